"""From what the user wrote to a folder of files: alias, dummy:<name>, .gguf, local folder or Hub id.

`resolve` reads the spec and makes sure that the files exist, fetching and converting once if need be; no weight is
read. Whatever the source was, what comes out is a Hugging Face folder, or a dummy shape.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from minivllm.errors import ModelError
from minivllm.loading import hub, wheel
from minivllm.loading.cache import Cache, file_key
from minivllm.loading.safetensors_io import read_json, weight_files
from minivllm.models import EncoderSpec, ModelSpec, read_spec
from minivllm.registry import did_you_mean

ALIASES = {"smollm2-135m": wheel.SMOLLM2, "minilm": wheel.MINILM, "all-minilm-l6-v2": wheel.MINILM}
DUMMY_PREFIX = "dummy:"

# Files of a tokenizer that stand beside tokenizer.json and that the engine reads.
_BESIDE = ("chat_template.jinja", "generation_config.json")
_TOKENIZER_SOURCES = ("tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    name: str  # what users call it: /v1/models
    source: str  # one sentence: where it comes from
    spec: ModelSpec | EncoderSpec
    weights: tuple[Path, ...]  # safetensors files; none: random weights
    tokenizer_dir: Path  # holds tokenizer.json, tokenizer_config.json and maybe a chat template
    seconds: dict[str, float] = field(default_factory=dict)  # what took how long
    # Writes (once) and names the safetensors file with the matrices that a GGUF file holds in 4 or 8 bits.
    packed: Callable[[], Path] | None = None


def resolve(path: str, cache_dir: Path | str | None = None, tokenizer: str | None = None) -> ModelFiles:
    """`tokenizer`: a folder or Hub id whose tokenizer replaces the model's own. Raises ModelError for a model that
    cannot be found, fetched or read, or that is not supported."""
    cache = Cache(cache_dir)
    found = _find(path, cache)
    start = time.perf_counter()
    tokenizer_dir = _tokenizer_dir(found.tokenizer_dir if tokenizer is None else _tokenizer_source(tokenizer), cache)
    found.seconds["tokenizer"] = time.perf_counter() - start
    return replace(found, tokenizer_dir=tokenizer_dir)


def _find(path: str, cache: Cache) -> ModelFiles:
    if path in ALIASES:
        return _alias(path, cache)
    if path.startswith(DUMMY_PREFIX):
        return _dummy(path, cache)
    local = Path(path).expanduser()
    if local.is_file():
        return _file(local, cache)
    if local.is_dir():
        return _folder(local, local.resolve().name, f"local folder {local}")
    if not looks_like_hub_id(path):
        raise _unknown(path)
    return _folder(hub.download(path), path, f"Hugging Face Hub, {path}")


def _tokenizer_source(path: str) -> Path:
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if not looks_like_hub_id(path):
        raise ModelError(f'tokenizer "{path}": no such folder. Give a local folder or a Hub id')
    return hub.download(path, hub.TOKENIZER_FILES)


def looks_like_hub_id(path: str) -> bool:
    """owner/name, and nothing that only a path has: a leading dot, slash or tilde, a file's ending."""
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path)) and not path.endswith(
        (".gguf", ".safetensors", ".bin", ".json", ".pt", ".pth")
    )


def _unknown(path: str) -> ModelError:
    from minivllm.loading.dummy import SHAPES

    known = [*ALIASES, *(DUMMY_PREFIX + name for name in SHAPES)]
    parent = Path(path).expanduser().parent
    beside = [p for p in parent.iterdir() if p.suffix == ".gguf" or p.is_dir()] if parent.is_dir() else []
    nearby = [str(parent / p.name) for p in beside if "/" in path and not p.name.startswith(".")]
    hint = did_you_mean(path, [*nearby, *known])
    return ModelError(
        f'model "{path}": no such file or folder, and not a Hub id (owner/name).{hint} Known names: {", ".join(known)}'
    )


def _alias(name: str, cache: Cache) -> ModelFiles:
    from minivllm.loading.gguf_convert import CONVERSION_VERSION, convert

    model, seconds = ALIASES[name], {}
    if model.member.endswith("/"):  # a Hugging Face folder already
        fetch = lambda folder: timed(seconds, "fetch", lambda: wheel.fetch(model, folder))  # noqa: E731
        folder = cache.entry(f"fetched-{model.sha256[:16]}", fetch)
        return _folder(folder, name, f"{model.requirement} on PyPI", seconds)
    file_name = Path(model.member).name
    entry = f"{name}-{model.sha256[:16]}"

    def build(folder: Path) -> None:
        gguf = timed(seconds, "fetch", fetched)
        timed(seconds, "convert", lambda: convert(gguf, folder))

    def fetched() -> Path:
        return cache.entry(f"fetched-{model.sha256[:16]}", lambda folder: wheel.fetch(model, folder)) / file_name

    folder = cache.entry(f"v{CONVERSION_VERSION}-{entry}", build)
    files = _folder(folder, name, f"{file_name} from {model.requirement} on PyPI", seconds)
    return replace(files, packed=lambda: _packed(cache, entry, fetched))


def _packed(cache: Cache, entry: str, gguf: Callable[[], Path]) -> Path:
    from minivllm.loading.gguf_packed import FILE, PACKING_VERSION, write_packed

    return cache.entry(f"packed-v{PACKING_VERSION}-{entry}", lambda folder: write_packed(gguf(), folder)) / FILE


def _file(path: Path, cache: Cache) -> ModelFiles:
    if path.suffix != ".gguf":
        raise ModelError(
            f"{path}: a single file must be a .gguf; for safetensors give the folder that holds config.json"
        )
    from minivllm.loading.gguf_convert import CONVERSION_VERSION, convert

    seconds: dict[str, float] = {}
    entry = f"{path.stem}-{file_key(path)}"
    build = lambda aside: timed(seconds, "convert", lambda: convert(path, aside))  # noqa: E731
    folder = cache.entry(f"v{CONVERSION_VERSION}-{entry}", build)
    files = _folder(folder, path.stem, f"local file {path}", seconds)
    return replace(files, packed=lambda: _packed(cache, entry, lambda: path))


def _folder(folder: Path, name: str, source: str, seconds: dict[str, float] | None = None) -> ModelFiles:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: no config.json. A model is a Hugging Face folder or a .gguf file")
    generation = folder / "generation_config.json"
    spec = read_spec(
        read_json(folder / "config.json"),
        read_json(generation) if generation.is_file() else None,
        where=str(folder / "config.json"),
    )
    return ModelFiles(name, source, spec, weight_files(folder), folder, {} if seconds is None else seconds)


def _dummy(path: str, cache: Cache) -> ModelFiles:
    from minivllm.loading.dummy import SHAPES, TOKENIZER_VERSION, dummy_spec, write_tokenizer

    name = path.removeprefix(DUMMY_PREFIX)
    if name not in SHAPES:
        raise ModelError(f'no dummy shape "{name}".{did_you_mean(name, list(SHAPES))} Shapes: {", ".join(SHAPES)}')
    spec = dummy_spec(name)
    entry = f"dummy-tokenizer-v{TOKENIZER_VERSION}-{spec.vocab_size}"
    tokenizer_dir = cache.entry(entry, lambda folder: write_tokenizer(folder, spec.vocab_size))
    return ModelFiles(path, f"random weights in the shape of {name}", spec, (), tokenizer_dir)


def _tokenizer_dir(folder: Path, cache: Cache) -> Path:
    if (folder / "tokenizer.json").is_file():
        return folder
    sources = [folder / name for name in _TOKENIZER_SOURCES if (folder / name).is_file()]
    if not sources:
        raise ModelError(f"{folder}: no tokenizer.json. Fetch it, or give a folder that has one as the tokenizer")
    return cache.entry(f"tokenizer-{file_key(sources[0])}", lambda aside: _convert_tokenizer(folder, aside))


def _convert_tokenizer(folder: Path, aside: Path) -> None:
    """Through transformers, once: its slow import and conversion are paid by the first start only."""
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(folder).save_pretrained(aside)
    except (ValueError, OSError, ImportError, KeyError, TypeError) as e:
        raise ModelError(f"{folder}: the tokenizer cannot be converted to tokenizer.json ({e})") from e
    if not (aside / "tokenizer.json").is_file():
        raise ModelError(f"{folder}: this tokenizer has no tokenizer.json form, which is the only supported one")
    for name in _BESIDE:
        if (folder / name).is_file() and not (aside / name).is_file():
            shutil.copyfile(folder / name, aside / name)


def timed(seconds: dict[str, float], what: str, action):
    start = time.perf_counter()
    result = action()
    seconds[what] = time.perf_counter() - start
    return result
