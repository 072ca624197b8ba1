"""A client that asks for little, again and again, and notes how long each answer took. It is a process of its own: its
times are not those of a busy test.

    python -m attack.quiet PORT KEY      until its standard input ends; one JSON line for each answer
"""

from __future__ import annotations

import json
import sys
import threading
import time

import httpx

ASKED = {"prompt": "The sea is", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
LONGEST = 60.0  # seconds, which nobody should have to wait


writing = threading.Lock()  # print() writes a line and its end apart, and there are two threads


def note(kind: str, begin: float, ok: bool, said: str = "") -> None:
    line = json.dumps({"kind": kind, "at": begin, "seconds": time.monotonic() - begin, "ok": ok, "said": said})
    with writing:
        print(line, flush=True)


def ask(client: httpx.Client, method: str, path: str, **options: object) -> None:
    begin = time.monotonic()
    try:
        reply = client.request(method, path, **options)
    except httpx.HTTPError as error:
        return note(path, begin, False, repr(error))
    good = reply.status_code == 200
    note(path, begin, good, reply.json()["choices"][0]["text"] if good and method == "POST" else reply.text)


def main(port: str, key: str) -> None:
    over = threading.Event()
    client = httpx.Client(
        base_url=f"http://127.0.0.1:{port}", headers={"authorization": f"Bearer {key}"}, timeout=LONGEST
    )

    def look_at_health() -> None:
        while not over.wait(0.25):
            ask(client, "GET", "/health")

    def talk() -> None:
        while not over.wait(0.02):
            ask(client, "POST", "/v1/completions", json=ASKED)

    threads = [threading.Thread(target=work, daemon=True) for work in (look_at_health, talk)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join(LONGEST)


if __name__ == "__main__":
    main(*sys.argv[1:])
