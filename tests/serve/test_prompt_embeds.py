"""Rule: prompt_embeds are answered as the tokens that they stand for; what is no such tensor is a 400, and cheap."""

from __future__ import annotations

import base64
import io
import pickle
import resource
import zipfile
from collections.abc import Callable

import httpx
import numpy as np
import pytest
import torch

from minivllm.errors import BadRequest
from minivllm.loading import load_model
from minivllm.serve.prompt_embeds import read_embeds, read_tensor

IDS = list(range(3, 40))


def saved(tensor, **options) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer, **options)
    return buffer.getvalue()


def encoded(tensor) -> str:
    return base64.b64encode(saved(tensor)).decode()


@pytest.fixture(scope="module")
def vectors():
    return load_model("dummy:tiny", torch.float32, torch.device("cpu")).model.embed(torch.tensor(IDS))


@pytest.fixture(scope="module")
def url(serving):
    from minivllm.engine.async_llm import AsyncLLM

    engine = AsyncLLM("dummy:tiny", overrides={"kv.num_blocks": 64, "model.dtype": "float32"}, max_model_len=256)
    with serving(engine, names=("tiny",), takes_embeds=True) as url:
        yield url


def post(url, **fields):
    body = {"temperature": 0, "max_tokens": 6, "return_token_ids": True, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def test_vectors_of_tokens_are_answered_as_the_tokens(url, vectors):
    expected = post(url, prompt=IDS).json()
    for prompt in ("", None, []):
        found = post(url, prompt=prompt, prompt_embeds=encoded(vectors)).json()
        assert found["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
        assert found["usage"]["prompt_tokens"] == len(IDS)
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


def test_several_come_before_the_texts(url, vectors):
    choices = post(url, prompt=["a"], prompt_embeds=[encoded(vectors), encoded(vectors[:9])]).json()["choices"]
    alone = [{"prompt": IDS}, {"prompt": IDS[:9]}, {"prompt": "a"}]
    assert [c["token_ids"] for c in choices] == [post(url, **p).json()["choices"][0]["token_ids"] for p in alone]


def test_a_stream_and_samples_begin_from_them_too(url, vectors):
    lines = post(url, prompt_embeds=encoded(vectors), stream=True).text.splitlines()
    assert lines[-2] == "data: [DONE]"
    choices = post(url, prompt_embeds=encoded(vectors), n=2, best_of=2).json()["choices"]
    assert choices[0]["token_ids"] == choices[1]["token_ids"] == post(url, prompt=IDS).json()["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    "field, fields",
    [
        ("echo", {"echo": True}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 3}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("repetition_penalty", {"repetition_penalty": 1.2}),
        ("prompt_embeds", {"prompt_embeds": "x"}),
        ("prompt_embeds", {"prompt_embeds": ""}),
        ("prompt_embeds", {"prompt_embeds": 5}),
        ("prompt", {"prompt_embeds": []}),
    ],
)
def test_what_does_not_go_with_them_is_a_400_that_names_the_field(url, vectors, field, fields):
    reply = post(url, **{"prompt_embeds": encoded(vectors), **fields})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == field, reply.text


def test_a_server_takes_none_unless_it_is_told_to(tiny_url, vectors):
    reply = post(tiny_url, prompt_embeds=encoded(vectors))
    assert reply.status_code == 400 and "--enable-prompt-embeds" in reply.json()["error"]["message"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_tensor_is_read_as_torch_reads_it(dtype):
    given = torch.randn(7, 12).to(dtype)
    for tensor in (given, given[None], given[2:5], given[2:3, :], given[1:, :].contiguous()):
        assert np.array_equal(read_tensor(saved(tensor)), tensor.float().numpy() if dtype.itemsize < 8 else tensor)
    assert read_embeds(encoded(given), 12, 9).shape == (7, 12)


class Attack:
    def __reduce__(self):
        return print, ("this must never be seen",)


def rewritten(change) -> bytes:
    """A file of torch.save, with change({name: content}) made."""
    source = zipfile.ZipFile(io.BytesIO(saved(torch.zeros(4, 8))))
    entries = {name: source.read(name) for name in source.namelist()}
    change(entries)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, content in entries.items():
            file.writestr(name, content)
    return out.getvalue()


def with_pickle(content: bytes) -> bytes:
    return rewritten(lambda entries: entries.update({"archive/data.pkl": content}))


def of_sizes(*sizes: int) -> bytes:
    """offset, rows, columns, and both strides."""
    offset, rows, columns, *strides = (pickle.encode_long(n) for n in sizes)
    number = [b"\x8a" + bytes([len(n)]) + n for n in (offset, rows, columns, *strides)]
    head = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    head += b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x20tQ"
    return with_pickle(head + number[0] + number[1] + number[2] + b"\x86" + number[3] + number[4] + b"\x86\x89)tR.")


def compressed() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"x")
        with file.open("archive/data/0", "w") as content:  # in pieces: a test looks at the most memory ever taken
            for _ in range(200):
                content.write(bytes(1_000_000))
    return out.getvalue()


HOSTILE: dict[str, Callable[[], bytes]] = {
    "code": lambda: saved(Attack()),
    "code, in the old form": lambda: saved(Attack(), _use_new_zipfile_serialization=False),
    "the old form": lambda: saved(torch.zeros(4, 8), _use_new_zipfile_serialization=False),
    "a pickle alone": lambda: pickle.dumps(Attack()),
    "a bomb": compressed,
    "sparse": lambda: saved(torch.zeros(4, 8).to_sparse()),
    "sparse rows": lambda: saved(torch.zeros(4, 8).to_sparse_csr()),
    "a parameter": lambda: saved(torch.nn.Parameter(torch.zeros(4, 8))),
    "a dictionary": lambda: saved({"x": torch.zeros(4, 8)}),
    "integers": lambda: saved(torch.zeros(4, 8, dtype=torch.int64)),
    "complex": lambda: saved(torch.zeros(4, 8, dtype=torch.complex64)),
    "quantised": lambda: saved(torch.quantize_per_tensor(torch.zeros(4, 8), 0.1, 0, torch.qint8)),
    "transposed": lambda: saved(torch.zeros(8, 4).T),
    "expanded": lambda: saved(torch.zeros(1, 8).expand(10**12, 8)),
    "larger than its storage": lambda: of_sizes(0, 10**9, 8, 8, 1),
    "behind its storage": lambda: of_sizes(10**12, 4, 8, 8, 1),
    "before its storage": lambda: of_sizes(-8, 4, 8, 8, 1),
    "of negative sizes": lambda: of_sizes(0, -4, -8, -8, 1),
    "of overlapping rows": lambda: of_sizes(0, 10**12, 8, 0, 1),
    "room for four gigabytes": lambda: with_pickle(b"\x80\x02Nr\xff\xff\xff\xff."),
    "a byte array of a terabyte": lambda: with_pickle(b"\x80\x05\x96" + (10**12).to_bytes(8, "little") + b"."),
    "a pickle of a megabyte": lambda: with_pickle(b"\x80\x02" + b"N0" * 500_000 + b"N."),
    "big-endian": lambda: rewritten(lambda entries: entries.update({"archive/byteorder": b"big"})),
    "no storage": lambda: rewritten(lambda entries: entries.pop("archive/data/0")),
    "no pickle": lambda: rewritten(lambda entries: entries.pop("archive/data.pkl")),
    "many entries": lambda: rewritten(lambda entries: entries.update({f"archive/{i}": b"" for i in range(20_000)})),
    "cut off": lambda: saved(torch.zeros(4, 8))[:-30],
    "nothing": bytes,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_dense_tensor_is_refused_and_takes_no_memory(name, capfd):
    given = base64.b64encode(HOSTILE[name]()).decode()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadRequest, match="prompt_embeds"):
        read_embeds(given, 8, 100)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes
    assert "never" not in capfd.readouterr().out


def test_a_tensor_of_another_shape_or_of_no_numbers_is_refused():
    for wrong in (torch.zeros(4, 7), torch.zeros(8), torch.zeros(2, 2, 8), torch.zeros(0, 8), torch.zeros(101, 8)):
        with pytest.raises(BadRequest, match="prompt_embeds"):
            read_embeds(encoded(wrong), 8, 100)
    for number in (float("nan"), float("inf"), 1e20):
        with pytest.raises(BadRequest, match="numbers from"):
            read_embeds(encoded(torch.full((4, 8), number)), 8, 100)
    assert len(read_embeds(encoded(of_good := torch.ones(4, 8)), 8, 100)) == len(of_good)


def test_the_forged_file_is_read_where_it_is_right():
    assert read_tensor(of_sizes(0, 4, 8, 8, 1)).shape == (4, 8)
