"""Loading and unloading LoRA adapters over HTTP: vLLM's two endpoints, off unless the server was told from where.

Whoever can load an adapter can make the server open files, so a path is followed to its end, links included, and must
end below one of the folders of --lora-dir. The folder's two files must, too: either could be a link out of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from minivllm.lora.request import CONFIG, WEIGHTS
from minivllm.lora.table import Adapter
from minivllm.serve import audit, protocol
from minivllm.serve.bodies import taken
from minivllm.serve.connection import reply
from minivllm.serve.errors import ApiError

LONGEST_PATH = 4096  # Linux' PATH_MAX


async def load_lora_adapter(request: Request) -> Response:
    body = await taken(request, protocol.LoadAdapter)
    audit.note(request, adapter=body.lora_name, path=body.lora_path)
    folder = allowed_folder(body.lora_path, request.app.state.lora_dirs)
    service = request.app.state.service
    if body.lora_name in service.names:
        raise ApiError(400, f'"{body.lora_name}" is the name of the model itself', param="lora_name")
    adapter = await service.engine.load_lora(body.lora_name, str(folder))
    return reply(adapter_card(request, adapter))


async def unload_lora_adapter(request: Request) -> Response:
    body = await taken(request, protocol.UnloadAdapter)
    audit.note(request, adapter=body.lora_name)
    check_on(request.app.state.lora_dirs)
    await request.app.state.service.engine.unload_lora(body.lora_name)
    return reply(protocol.ModelDeleted(body.lora_name))


def adapter_card(request: Request, adapter: Adapter) -> protocol.ModelCard:
    state = request.app.state
    return protocol.ModelCard(
        id=adapter.name,
        created=state.created,
        root=adapter.path,
        max_model_len=state.service.engine.max_model_len,
        parent=state.service.model,
    )


def check_on(roots: Sequence[Path]) -> None:
    if not roots:
        how = "start the server with --lora-dir FOLDER to allow adapters from below that folder"
        raise ApiError(403, f"loading and unloading adapters is off here: {how}", code="lora_loading_off")


def allowed_folder(path: str, roots: Sequence[Path]) -> Path:
    """The folder that `path` leads to; a relative one starts at each of the roots. roots: themselves resolved.

    Raises ApiError 403 for anything outside of them, whether it exists or not.
    """
    check_on(roots)
    if "\0" in path:
        raise ApiError(400, "lora_path holds a null character", param="lora_path")
    if len(path) > LONGEST_PATH:
        raise ApiError(400, f"lora_path is longer than {LONGEST_PATH:,} characters", param="lora_path")
    folders = [folder for root in roots if _is_below(folder := _end_of(root / path), roots)]
    folders = [folder for folder in folders if all(_is_below(_end_of(folder / n), roots) for n in (CONFIG, WEIGHTS))]
    if not folders:
        message = f'"{path}" is not below a folder that this server loads adapters from'
        raise ApiError(403, message, code="path_not_allowed", param="lora_path")
    return next((folder for folder in folders if os.path.isdir(folder)), folders[0])


def _end_of(path: Path) -> Path:
    """Links followed as far as they lead: a loop of them, or a name that is too long for the system, is no error."""
    return Path(os.path.realpath(path))


def _is_below(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)
