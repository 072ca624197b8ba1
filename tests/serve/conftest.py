"""A server on a real socket, and an engine whose every move a test can dictate."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from eventually import PATIENCE, eventually

from minivllm.engine.core import EngineStats
from minivllm.engine.metrics import Metrics
from minivllm.engine.output import CompletionOutput, RequestMetrics, RequestOutput
from minivllm.serve.app import create_app
from minivllm.serve.server import Server


class LetterTokenizer:
    """One character, one token."""

    vocab_size = 0x110000
    eos_token_ids = (0,)
    special_ids = frozenset()

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(map(chr, token_ids))

    def token_text(self, token_id):
        return chr(token_id)

    def token_bytes(self, token_id):
        return chr(token_id).encode()

    tool_template = chat_template = None
    special_tokens = {}
    template_variables = frozenset()

    def apply_chat_template(
        self, messages, add_generation_prompt=True, continue_final_message=False, variables=None, **kwargs
    ):
        self.rendered = {"messages": messages, **(variables or {}), **kwargs}
        return "".join(f"<{m['role'][0]}>{m['content'] or ''}" for m in messages) + "<a>" * add_generation_prompt


MARKS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>")


class FillingTokenizer(LetterTokenizer):
    """Knows StarCoder's tokens, beyond all letters."""

    def encode(self, text, add_special_tokens=True):
        return [0x110000 + MARKS.index(text)] if text in MARKS else super().encode(text)


class FakeEngine:
    """Answers with the letters of `script`, one a step. The script's items may also be exceptions to raise, or a
    threading.Event to wait for."""

    max_model_len = 100
    model_name = "fake"
    task = "generate"
    is_running = True
    stalled = None
    dead_replicas = ()
    decisions = ()
    info: dict[str, object] = {}  # it has no KV cache
    config = SimpleNamespace(
        model=SimpleNamespace(path="fake"),
        scheduler=SimpleNamespace(max_num_seqs=2, policy="fcfs"),
        engine=SimpleNamespace(max_logprobs=20),
    )

    def __init__(self):
        self.tokenizer = LetterTokenizer()
        self.stats = EngineStats()
        self.watchers = []
        self.reset()

    def reset(self):
        self.is_running = True
        self.script = ["a", "b", "c"]
        self.calls = []
        self.num_open = 0
        self.num_closed_early = 0

    async def generate(
        self, prompt, params, request_id, *, priority=0, cache_salt="", output_kind="cumulative", client="",
        on_start=lambda metrics: None, **_,
    ):  # fmt: skip
        on_start(metrics := RequestMetrics(0.0))
        call = {"prompt": prompt, "params": params, "id": request_id, "priority": priority}
        self.calls.append(SimpleNamespace(**call, salt=cache_salt, client=client))
        self.num_open += 1
        finished = False
        try:
            text = ""
            for i, item in enumerate(self.script):
                if isinstance(item, BaseException):
                    raise item
                if isinstance(item, str):
                    metrics.num_generation_tokens += len(item)
                    text = item if output_kind == "delta" else text + item
                    finished = i == len(self.script) - 1
                    if output_kind != "final" or finished:
                        yield self._output(prompt, request_id, text, finished)
                else:
                    while not item.is_set():
                        await asyncio.sleep(0.005)
                await asyncio.sleep(0)
        finally:
            self.num_open -= 1
            self.num_closed_early += not finished

    def _output(self, prompt, request_id, text, finished):
        out = CompletionOutput(
            index=0, text=text, token_ids=[ord(c) for c in text], logprobs=None,
            finish_reason="stop" if finished else None, stop_reason=None,
        )  # fmt: skip
        return RequestOutput(
            request_id=request_id, prompt=None, prompt_token_ids=prompt["prompt_token_ids"], prompt_logprobs=None,
            outputs=[out], finished=finished, num_cached_tokens=0,
        )  # fmt: skip

    def list_loras(self):
        return []

    async def shutdown(self):
        self.is_running = False


@contextmanager
def serving(engine, metrics=None, names=("fake",), tls=None, **options):
    """The server's base URL, while it runs in a thread."""
    app = create_app(engine, metrics or Metrics(names[0]), names, **options)
    ready = threading.Event()
    server = Server(app, ready.set, **(tls or {}))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run_on, args=(listener,))
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the server did not stop"


@pytest.fixture(name="serving", scope="session")
def serving_fixture():
    return serving


@pytest.fixture(name="eventually", scope="session")
def eventually_fixture():
    return eventually


@pytest.fixture(scope="session")
def tiny_url():
    """Of a server of random weights, called tiny, with a room of 256 tokens."""
    from minivllm.engine.async_llm import AsyncLLM

    engine = AsyncLLM("dummy:tiny", overrides={"kv.num_blocks": 64, "model.dtype": "float32"}, max_model_len=256)
    with serving(engine, Metrics("tiny"), ("tiny",)) as url:
        yield url


@pytest.fixture
def fake_engine():
    return FakeEngine()


@pytest.fixture(scope="module")
def one_server():
    engine = FakeEngine()
    with serving(engine) as url:
        yield SimpleNamespace(engine=engine, url=url)


@pytest.fixture
def fake(one_server):
    """(engine, url) of a server over a fake engine that has forgotten the test before."""
    one_server.engine.reset()
    return one_server
