"""`llama-server` as llama.cpp's tests call it: options translated, models replaced by those at hand.

Those tests start a server each, some hundreds in all, and minivllm takes seconds to start. So servers are kept, one
for each set of options, and this process hands its port's connections on to one of them. run.py ends those that were
kept. A test may thus find in the prefix cache what an earlier one left.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from clients.peers_suites.vllm_server import CONTEXT, CROSS_ENCODES, EMBEDS, GENERATES, Refused

MODELS = {"bert-bge-small": EMBEDS, "jina-reranker": CROSS_ENCODES}
NAMES = ("test", "davinci-002", "gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "gpt-4.1", "text-embedding-3-small")
NUM_KEPT = 4
PATIENCE = 120  # seconds

# Where models come from, how llama.cpp's own parts run, and what is always so here.
DROPPED = {
    "--temp": 1,
    "--offline": 0,
    "--hf-file": 1,
    "--batch-size": 1,
    "--ubatch-size": 1,
    "--threads": 1,
    "--cont-batching": 0,
    "--embedding": 0,
    "--reranking": 0,
    "--metrics": 0,
    "--slots": 0,
    "--no-slots": 0,
    "--n-predict": 1,
    "--jinja": 0,
    "--no-jinja": 0,
    "--backend_sampling": 0,
    "--cache-ram": 1,
    "--verbose": 0,
    "-fa": 1,
}
RENAMED = {"--seed": "--seed", "--api-key": "--api-key", "--pooling": "--pooling", "--cors-origins": "--cors-origin"}
CHAT_TEMPLATES = {  # that llama.cpp has built in, of those that its tests name
    "chatml": "{% for each in messages %}<|im_start|>{{ each.role }}\n{{ each.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama3": "{% for each in messages %}<|start_header_id|>{{ each.role }}<|end_header_id|>\n\n{{ each.content }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "command-r": "{% set names = {'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'} %}"
    "{% for each in messages %}<|START_OF_TURN_TOKEN|><|{{ names[each.role] }}_TOKEN|>{{ each.content }}"
    "<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
}
REASONING = {"none": "none", "deepseek": "auto", "auto": "auto"}


def translated(given: Sequence[str]) -> tuple[int, list[str]]:
    """The port, and the arguments of `minivllm.serve` for those of `llama-server`. Raises Refused."""
    rest, made, port, shared = list(given), [], 8080, False
    asked = {"--alias": "tinyllama-2", "--ctx-size": "", "--parallel": "1"}
    while rest:
        option = rest.pop(0)
        if option in DROPPED:
            del rest[: DROPPED[option]]
        elif option == "--kv-unified":
            shared = True
        elif option == "--port":
            port = int(rest.pop(0))
        elif option in ("--host", "--hf-repo", *asked):
            asked[option] = rest.pop(0)
        elif option in RENAMED:
            made += [RENAMED[option], rest.pop(0)]
        elif option == "--chat-template":
            made += [option, template_file(rest.pop(0))]
        elif option == "--chat-template-file":
            made += ["--chat-template", os.path.abspath(rest.pop(0))]
        elif option == "--reasoning-format" and rest[0] in REASONING:
            made += ["--reasoning-parser", REASONING[rest.pop(0)]]
        elif option == "--reasoning" and rest[0] in ("on", "auto"):
            rest.pop(0)
        elif option == "--no-ui":
            made.append("--no-page")
        else:
            raise Refused(option)
    if "," in asked.get("--host", ""):
        raise Refused("--host of several addresses")
    model = MODELS.get(asked["--alias"], GENERATES)
    slots = 1 if shared else int(asked["--parallel"])  # that divide the context
    if asked["--ctx-size"]:
        made += ["--max-model-len", str(min(int(asked["--ctx-size"]) // slots, CONTEXT[model]))]
    made += ["--model", os.environ.get(model, model), "--served-model-name", *asked["--alias"].split(","), *NAMES]
    return port, [*made, "--max-num-seqs", asked["--parallel"], "--log-level", "warning"]


def template_file(text: str) -> str:
    """That holds a template which is given as text or by name. Raises Refused for a name of llama.cpp that is not
    here."""
    text = CHAT_TEMPLATES.get(text, text)
    if text.isidentifier():
        raise Refused(f"--chat-template {text}")
    path = Path(os.environ["PEERS_KEPT"]) / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jinja"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


# ------------------------------------------------------------------------------------------------- the servers


def kept_server(folder: Path, arguments: Sequence[str]) -> int:
    """The port of a server with these options, started unless there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / f"{hashlib.sha256(json.dumps(arguments).encode()).hexdigest()[:16]}.json"
        if path.exists() and is_alive(pid_of(path)):
            path.touch()
            return port_of(path)
        others = sorted(folder.glob("*.json"), key=lambda other: other.stat().st_mtime)
        for oldest in others[: max(0, len(others) - NUM_KEPT + 1)]:
            end(oldest)
        start(path, arguments)
        return port_of(path)


def start(path: Path, arguments: Sequence[str]) -> None:
    """It is known before it is ready: this process may be ended meanwhile."""
    command = [sys.executable, "-u", "-m", "minivllm.serve", *arguments, "--port", "0"]
    with open(path.with_suffix(".log"), "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    path.write_text(json.dumps({"pid": process.pid, "arguments": list(arguments)}))


def pid_of(path: Path) -> int:
    return json.loads(path.read_text())["pid"]


def port_of(path: Path) -> int:
    """Of a server, once it is ready."""
    log, pid, deadline = path.with_suffix(".log"), pid_of(path), time.monotonic() + PATIENCE
    while not (ready := re.search(r"^Ready.*:(\d+)/v1", log.read_text(), re.M)):
        if has_ended(pid) or time.monotonic() > deadline:
            sys.exit(f"minivllm did not start: {log.read_text()[-500:]}")
        time.sleep(0.05)
    return int(ready[1])


def has_ended(pid: int) -> bool:
    """Also of one that nobody has waited for. It may have no command line yet, so is_alive would be wrong."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def is_alive(pid: int) -> bool:
    try:
        return "minivllm" in Path(f"/proc/{pid}/cmdline").read_text()  # empty: it has ended, and nobody has waited
    except OSError:
        return False


def end(path: Path) -> None:
    pid = pid_of(path)
    if is_alive(pid):
        os.kill(pid, signal.SIGTERM)
    path.unlink()


def end_all(folder: Path) -> None:
    for path in folder.glob("*.json"):
        end(path)


# ----------------------------------------------------------------------------------------------------------- forwarding


async def hand_on(listener: socket.socket, to: int) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward = await asyncio.open_connection("127.0.0.1", to)
        except OSError:
            return writer.close()
        await asyncio.gather(pipe(reader, onward[1]), pipe(onward[0], writer))

    server = await asyncio.start_server(connected, sock=listener)
    await server.serve_forever()


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until one side leaves; then the other is left too, as a client that goes away ends its request."""
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()


def bind(listener: socket.socket, port: int) -> None:
    """The tests kill a server and start the next without waiting until it is gone."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return listener.bind(("127.0.0.1", port))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main() -> None:
    try:
        port, arguments = translated(sys.argv[1:])
    except Refused as error:
        sys.exit(f"refused: {error}")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bind(listener, port)  # it is this process's before a server is started for it
        asyncio.run(hand_on(listener, kept_server(Path(os.environ["PEERS_KEPT"]), arguments)))


if __name__ == "__main__":
    main()
