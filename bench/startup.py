"""Where does the time go from typing the command to the first token?

Fresh processes, split by part. Warm: the default model has been fetched and converted. `--cold`: it has only been
fetched, so each run converts it again into an empty cache. In both the operating system's page cache is as the runs
before left it, and Python keeps its bytecode, as it does unless PYTHONDONTWRITEBYTECODE is set (then every start
compiles this package again: some 0.6 s).

    python -m bench startup --runs 5 --cold
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import emit, note, parser, spread

from minivllm.config import DEFAULT_MODEL

# Runs in the fresh process. argv: wall-clock time at which it was started, model.
CHILD = """
import time
parts, last = {}, float(__import__("sys").argv[1])
def part(name):
    global last
    now = time.time()
    parts[name], last = now - last, now
part("interpreter")
import torch
part("import torch")
import sys
from minivllm import LLM, SamplingParams
part("import minivllm")
llm = LLM(sys.argv[2])
part("load")
output = llm.generate("Hello", SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
assert len(output[0].outputs[0].token_ids) == 1
part("first token")
import json
print("\\n" + json.dumps({"parts": parts, "info": llm.info}, default=str))
"""


def run(model: str, cache: Path | None) -> dict[str, float]:
    env = os.environ | ({"XDG_CACHE_HOME": str(cache)} if cache else {})
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", CHILD, repr(time.time()), model]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    parts = json.loads(done.stdout.splitlines()[-1])["parts"]
    total = sum(parts.values())
    return parts | {"beyond torch": total - parts["import torch"], "total": total}


def fetched_only(folder: Path) -> Path:
    """A cache that holds the download and nothing made from it."""
    from minivllm.loading.cache import default_cache_dir

    (folder / "minivllm").mkdir()
    for entry in default_cache_dir().glob("fetched-*"):
        shutil.copytree(entry, folder / "minivllm" / entry.name)
    return folder


def measure(model: str, runs: int, cold: bool) -> dict[str, dict]:
    rows = []
    for i in range(-1, runs):  # run -1 warms the page cache (and fetches the model, if it never was)
        with tempfile.TemporaryDirectory() as folder:
            parts = run(model, fetched_only(Path(folder)) if cold else None)
        if i >= 0:
            rows.append(parts)
            note(f"{'cold' if cold else 'warm'} run {i}: " + ", ".join(f"{k} {v:.2f}" for k, v in parts.items()) + " s")
    return {name: spread([row[name] for row in rows]) for name in rows[0]}


def main() -> None:
    args = parser(__doc__.splitlines()[0], Path(__file__).stem)
    args.add_argument("--model", default=DEFAULT_MODEL)
    args.add_argument("--runs", type=int, default=5)
    args.add_argument("--cold", action="store_true", help="also with an empty cache (the download apart)")
    args = args.parse_args()
    results = {"warm_seconds": measure(args.model, args.runs, cold=False)}
    if args.cold:
        results["cold_seconds"] = measure(args.model, args.runs, cold=True)
    emit("startup", {"model": args.model, "runs": args.runs}, results, args.out)


if __name__ == "__main__":
    main()
