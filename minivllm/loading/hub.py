"""Models by Hub id, through huggingface_hub (its cache, its token, its settings)."""

from __future__ import annotations

from pathlib import Path

from minivllm.errors import ModelError

FILES = ("*.json", "*.safetensors", "model.bin", "tokenizer.model", "merges.txt", "vocab.txt", "*.jinja")
TOKENIZER_FILES = ("*.json", "tokenizer.model", "merges.txt", "vocab.txt", "*.jinja")
_INSTEAD = "Give a local folder or a .gguf file instead, or leave the model out for the default"


def download(repo: str, patterns: tuple[str, ...] = FILES) -> Path:
    """The local snapshot of `repo`, brought up to date if the Hub can be reached. Raises ModelError."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo, allow_patterns=list(patterns)))
    except GatedRepoError:
        raise ModelError(f'"{repo}" is gated: accept its terms on huggingface.co, then `hf auth login`') from None
    except RepositoryNotFoundError:
        raise ModelError(
            f'"{repo}" is not a local path, and the Hugging Face Hub has no such model. {_INSTEAD}'
        ) from None
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as e:
        raise unreachable(repo, e) from None


def unreachable(repo: str, cause: Exception) -> ModelError:
    first = (str(cause).strip().splitlines() or [""])[0]  # what follows is advice about the library's own functions
    wraps, detail = first.startswith("Got: "), first.removeprefix("Got: ")[:200]
    told = detail if wraps else f"{type(cause).__name__}: {detail}"
    return ModelError(
        f'"{repo}" is not a local path, and the Hugging Face Hub cannot be reached to fetch it ({told}). {_INSTEAD}'
    )
