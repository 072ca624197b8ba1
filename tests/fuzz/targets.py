"""The parsers of what strangers write, each as a function of bytes that returns, or raises that parser's own error.

Whatever else is raised is a finding, and so are more work or memory than an input of that length may ask for
(fuzz/limits.py).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

CORPUS = Path(__file__).parent / "corpus"


class Target(NamedTuple):
    name: str
    read: Callable[[bytes], Any]
    errors: Callable[[], tuple[type[Exception], ...]]  # called late: a target's modules are imported when it is used
    words: tuple[bytes, ...] = ()  # of its language: mutations put them in

    @property
    def corpus(self) -> tuple[bytes, ...]:
        return tuple(path.read_bytes() for path in sorted((CORPUS / self.name).iterdir()))


TARGETS: dict[str, Target] = {}


def target(errors: Callable[[], tuple[type[Exception], ...]], *words: bytes) -> Callable:
    def add(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        name = read.__name__
        TARGETS[name] = Target(name, read, errors, words)
        return read

    return add


def model_error() -> tuple[type[Exception], ...]:
    from minivllm.errors import ModelError

    return (ModelError,)


def bad_request() -> tuple[type[Exception], ...]:
    from minivllm.errors import BadRequest

    return (BadRequest,)


def user_error() -> tuple[type[Exception], ...]:
    from minivllm.errors import UserError

    return (UserError,)


def text(data: bytes) -> str:
    """As a request's field has it: characters, and no halves of them."""
    return data.decode("utf-8", "replace")


@functools.cache
def _root() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="minivllm-fuzz-")


def folder(name: str) -> Path:
    """Of a target, for all its inputs: each writes what it reads."""
    path = Path(_root().name) / name
    path.mkdir(exist_ok=True)
    return path


JSON = (
    b"null",
    b"true",
    b"Infinity",
    b"NaN",
    b"-1",
    b"1e999",
    b"[]",
    b"{}",
    b'""',
    b"9" * 30,
    b'"\\ud800"',
    b"[[[[[[[[",
)

# ------------------------------------------------------------------------------------------------------ models' files


@target(model_error, b"\0" * 8, b"\xff" * 8, b"\x09\0\0\0" * 3, b"general.alignment", b"\0\0\0\x80", b"llama", b"gpt2")
def gguf(data: bytes) -> None:
    from minivllm.files import read_json
    from minivllm.loading.gguf_convert import convert
    from minivllm.models import read_spec

    here = folder("gguf")
    (here / "m.gguf").write_bytes(data)
    convert(here / "m.gguf", here)
    read_spec(read_json(here / "config.json"), read_json(here / "generation_config.json"))


@target(model_error, b"\0" * 8, b"\xff" * 8, b'"dtype"', b'"F4"', b'"F8_E8M0"', b'"shape"', b'"data_offsets"', *JSON)
def safetensors(data: bytes) -> None:
    from minivllm.loading.safetensors_io import read_tensors

    path = folder("safetensors") / "model.safetensors"
    path.write_bytes(data)
    for _, tensor, _ in read_tensors([path]):
        assert tensor.nbytes <= len(data)


@target(model_error, b'"weight_map"', b"../", b"/etc/passwd", b"\\u0000", *JSON)
def index(data: bytes) -> None:
    from minivllm.loading.safetensors_io import INDEX, weight_files

    here = folder("index")
    (here / "a.safetensors").touch()
    (here / INDEX).write_bytes(data)
    assert all(path.resolve().is_relative_to(here.resolve()) for path in weight_files(here))


@target(model_error, b'"rope_parameters"', b'"rope_scaling"', b'"yarn"', b'"llama3"', b'"layer_types"', *JSON)
def config(data: bytes) -> None:
    from minivllm.files import read_json
    from minivllm.models import read_spec
    from minivllm.quantization.base import read_format

    path = folder("config") / "config.json"
    path.write_bytes(data)
    read_format(read_json(path))
    read_spec(read_json(path))


@target(bad_request, b'"rank_pattern"', b'"layers_to_transform"', b'"exclude_modules"', b'"all-linear"', *JSON)
def adapter(data: bytes) -> None:
    """The configuration, beside matrices that fit what the corpus says."""
    import torch
    from safetensors.torch import save_file

    from minivllm.lora.peft import CONFIG, WEIGHTS, Target, read_adapter

    here, module = folder("adapter"), "model.layers.0.self_attn.q_proj"
    if not (here / WEIGHTS).exists():
        matrices = {f"base_model.model.{module}.lora_{m}.weight": torch.ones(4, 4) for m in "AB"}
        save_file(matrices, here / WEIGHTS)
    (here / CONFIG).write_bytes(data)
    read_adapter(str(here), {module: Target(4, 4), "model.layers.1.mlp.up_proj": Target(4, 8)}, 8)


@target(model_error, b'"ByteLevel"', b'"ByteFallback"', b'"vocab"', b'"merges"', b'"added_tokens"', *JSON)
def tokenizer(data: bytes) -> None:
    from minivllm.engine.tokenizer import TextTokenizer

    here = folder("tokenizer")
    (here / "tokenizer.json").write_bytes(data)
    found = TextTokenizer.load(here)
    found.token_bytes(0)


@target(model_error, b'"chat_template"', b'"eos_token"', b'"add_bos_token"', b'"content"', b'"name"', *JSON)
def tokenizer_config(data: bytes) -> None:
    from minivllm.engine.tokenizer import TextTokenizer

    here = folder("tokenizer_config")
    (here / "tokenizer.json").write_bytes((CORPUS / "tokenizer" / "right-byte-fallback.json").read_bytes())
    (here / "tokenizer_config.json").write_bytes(data)
    TextTokenizer.load(here)


@target(model_error, b"{%", b"%}", b"{{", b"}}", b"{#", b"|", b" for x in y ", b"endfor", b"if", b"macro", b"((((((")
def chat_template(data: bytes) -> None:
    from minivllm.engine import chat_template as templates

    source = text(data)
    templates.knows_tools(source)
    templates.read_variables(source)
    templates.check(source)


# -------------------------------------------------------------------------------------------- what requests are held to


def regex_error() -> tuple[type[Exception], ...]:
    from minivllm.structured.regex import RegexError

    return (RegexError,)


def schema_error() -> tuple[type[Exception], ...]:
    from minivllm.structured.schema import SchemaError

    return (SchemaError,)


@target(regex_error, b"(?:", b")", b"[^", b"]", b"{2,3}", b"*", b"|", b"\\d", b"\\u0041", b"(?P<a>", b"((((")
def regex(data: bytes) -> None:
    from minivllm.structured import regex as expressions

    pattern = text(data)
    expressions.parse_search(pattern)
    expressions.render(expressions.parse(pattern))


@target(schema_error, b'"$ref"', b'"#/$defs/a"', b'"oneOf"', b'"allOf"', b'"type"', b'"required"', b'"enum"', *JSON[:2])
def schema(data: bytes) -> None:
    from minivllm.structured.normal import normal

    normal(text(data))


@target(bad_request, b'"$ref"', b'"oneOf"', b'"enum"', b'"pattern"', b'"maxLength"', b'"minItems"', b'"format"')
def json_tree(data: bytes) -> None:
    """A schema as the regular expression of its instances."""
    from minivllm.structured import json_regex
    from minivllm.structured.params import StructuredParams

    json_regex.json_tree(StructuredParams(json=text(data)))


@functools.cache
def _compiler() -> Any:
    from minivllm.structured.base import Vocabulary
    from minivllm.structured.compiler import GrammarCompiler
    from minivllm.structured.llguidance_backend import LLGuidanceBackend

    vocabulary = Vocabulary((b"", *(bytes([i]) for i in range(256))), (0,))
    return GrammarCompiler(lambda: vocabulary, (("llguidance", LLGuidanceBackend),))


@target(bad_request, b"root ::= ", b"start: ", b'"a"', b"[a-z]", b"{1,9}", b"|", b"%json {}", b"(", b")", b"\n")
def grammar(data: bytes) -> None:
    """GBNF and Lark, by the backend of a plain install."""
    from minivllm.structured.params import StructuredParams

    _compiler().compile(StructuredParams(grammar=text(data)))


# ---------------------------------------------------------------------------------------------------------- the server


@functools.cache
def _requests() -> tuple[type, ...]:
    """Every body that an endpoint takes: those that are no part of another."""
    from minivllm.serve import llama_cpp_protocol, messages_protocol, ollama_protocol, protocol, responses_protocol

    modules = (protocol, messages_protocol, ollama_protocol, llama_cpp_protocol, responses_protocol)
    found = itertools.chain.from_iterable(vars(module).values() for module in modules)
    return tuple(dict.fromkeys(k for k in found if isinstance(k, type) and issubclass(k, protocol.RequestBody)))


@target(bad_request, b'"messages"', b'"role"', b'"content"', b'"tools"', b'"stop"', b'"input"', b'"type"', *JSON)
def request(data: bytes) -> None:
    """By every Struct: each takes it, or says what is wrong."""
    from minivllm.errors import BadRequest
    from minivllm.serve import bodies

    errors: list[BadRequest] = []
    for kind in _requests():
        for ignored in ({}, None):
            try:
                bodies.parse(data, kind, ignored)
            except BadRequest as error:
                errors.append(error)
    if errors:
        raise errors[0]


class _Service:
    """No model: every line ends before it would be asked."""

    told: set[tuple[str, str]] = set()

    def check_model(self, name: str | None) -> None:
        from minivllm.errors import BadRequest

        raise BadRequest("no model")


@target(user_error, b'"custom_id"', b'"body"', b'"url"', b'"/v1/completions"', b'"method"', b"\n", *JSON)
def batch_line(data: bytes) -> None:
    from minivllm.serve import batch

    path = folder("batch_line") / "in.jsonl"
    path.write_bytes(data)
    batch.scan(path)
    for _, line in batch.lines(path):
        result, _ = asyncio.run(batch.one(line, _Service()))
        assert result.failed and (result.response is None or result.response.status_code < 500)


def cases() -> Iterator[tuple[Target, Path]]:
    for found in TARGETS.values():
        for path in sorted((CORPUS / found.name).iterdir()):
            yield found, path
