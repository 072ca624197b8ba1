"""Real clients, each in an environment of its own, against a server: what works?

    make clients                                 all clients, with random weights and with the default model
    make clients ARGS="--only instructor ai"     some of them
    make clients ARGS="--record"                 and keep the table in tests/clients/clients.json and docs/clients.md

A client is a file in suites/ and the packages that it needs. One that cannot be installed is not run, and the table
says why. A model's server is one process for all clients, one after the other. A record keeps the clients that were
not asked for.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clients.suites.common import CAPABILITIES

from bench.peers.install import NotInstalled, pip
from minivllm.config import DEFAULT_MODEL
from minivllm.loading import resolve

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SUITES = HERE / "suites"
RECORD = HERE / "clients.json"
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- written by make clients -->", "<!-- end -->"
MODELS = ("dummy:tiny", DEFAULT_MODEL)
# Of weights that answer suites/common.py's QUESTION with 282 tokens: neither over when a client leaves the answer, nor
# more than LONG_ENOUGH.
WEIGHTS = ["--set", "model.seed=19", "--dtype", "float32"]
TIMEOUT = 900  # seconds, of one client with one model


@dataclass(frozen=True)
class Client:
    name: str  # of the file in suites/
    packages: tuple[str, ...]  # the first is the one whose version is told
    folder: str = ""  # of the environment; Node's clients share one

    @property
    def is_nodes(self) -> bool:
        return self.folder == "node"

    @property
    def title(self) -> str:
        return f"{self.packages[0]} (Node)" if self.is_nodes else self.packages[0]


NODE = json.loads((SUITES / "node" / "package.json").read_text())["dependencies"]
CLIENTS = (
    Client("openai", ("openai",)),
    Client("anthropic", ("anthropic",)),
    Client("litellm", ("litellm", "mcp")),  # its tools import mcp, which it does not ask for
    Client("litellm_proxy", ("litellm[proxy]", "anthropic", "openai")),
    Client("lm_eval", ("lm-eval[api]", "transformers")),
    Client("llm", ("llm",)),
    Client("instructor", ("instructor", "anthropic")),
    Client("pydantic_ai", ("pydantic-ai-slim[openai]",)),
    Client("openai_agents", ("openai-agents",)),
    Client("langchain", ("langchain-openai", "langchain")),
    Client("llama_index", ("llama-index-llms-openai-like",)),
    Client("ai", ("ai",), "node"),
    Client("openai", ("openai",), "node"),
    Client("anthropic", ("@anthropic-ai/sdk",), "node"),
)


@dataclass(frozen=True)
class Environment:
    folder: Path
    client: Client

    def install(self) -> str:
        """The version of the client, installed unless it is. Raises NotInstalled."""
        return self._node() if self.client.is_nodes else self._python()

    def _python(self) -> str:
        python = self.folder / "bin" / "python"
        if not (self.folder / ".ready").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", self.folder], check=True, capture_output=True)
            pip(self.folder, "install", "pytest", *self.client.packages)
            (self.folder / ".ready").touch()
        name = self.client.packages[0].partition("[")[0]
        code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    def _node(self) -> str:
        for program in ("node", "npm"):
            if shutil.which(program) is None:
                raise NotInstalled(f"no {program} here (Debian, Ubuntu: apt install nodejs npm)")
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in (SUITES / "node").iterdir():
            shutil.copy(path, self.folder)
        if not (self.folder / "node_modules").exists():
            command = ["npm", "install", "--no-fund", "--no-audit"]
            done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
            if done.returncode:
                raise NotInstalled(f"npm install: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
        package = self.folder / "node_modules" / self.client.packages[0] / "package.json"
        return json.loads(package.read_text())["version"]

    def command(self, report: Path) -> list[str | Path]:
        """What runs the client's file and writes a JUnit report."""
        if self.client.is_nodes:
            to = f"--test-reporter-destination={report}"
            return ["node", "--test", "--test-reporter=junit", to, f"{self.client.name}.test.mjs"]
        alone = ["-c", os.devnull, "--rootdir", SUITES, "--confcutdir", SUITES, "--import-mode=importlib"]
        options = [*alone, "-p", "no:cacheprovider", "-q", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        return [self.folder / "bin" / "python", "-m", "pytest", *options, SUITES / f"test_{self.client.name}.py"]

    def run(self, url: str, model: str) -> dict[str, list[str]]:
        """What came of each test, by capability: "" (it passed) or why not."""
        report = self.folder.absolute() / f"report-{self.client.name}.xml"
        report.unlink(missing_ok=True)
        env = os.environ | {"PYTHONPATH": str(HERE.parent), "CLIENTS_URL": url, "CLIENTS_MODEL": model}
        if not model.startswith("dummy:"):
            env["CLIENTS_TOKENIZER"] = str(resolve(model).tokenizer_dir)
        where = self.folder if self.client.is_nodes else ROOT
        with open(self.folder / f"{self.client.name}.log", "w") as log:
            subprocess.run(self.command(report), cwd=where, env=env, stdout=log, stderr=log, timeout=TIMEOUT)
        if not report.exists():
            raise NotInstalled(f"its tests did not run: see {log.name}")
        return outcomes(report)


def outcomes(report: Path) -> dict[str, list[str]]:
    found = defaultdict(list)
    for case in xml.parse(report).iter("testcase"):
        marked = case.find("properties/property[@name='capability']")
        capability = case.get("name").partition(":")[0] if marked is None else marked.get("value")
        wrong = next((case.find(kind) for kind in ("failure", "error", "skipped") if case.find(kind) is not None), None)
        found[capability if capability in CAPABILITIES else "call"].append("" if wrong is None else reason(wrong))
    return dict(found)


def reason(wrong: xml.Element) -> str:
    first = (wrong.get("message") or wrong.text or "failed").strip().splitlines()[0][:200]
    if wrong.get("type") == "pytest.xfail":
        return f"known: {first}"
    return f"not run: {first}" if wrong.tag == "skipped" else f"FAILED: {first}"


# ------------------------------------------------------------------------------------------------------- the server


@contextmanager
def serving(model: str) -> Iterator[str]:
    """The URL of a server, while it runs."""
    command = [sys.executable, "-u", "-m", "minivllm.serve", "--model", model, "--port", "0", "--log-level", "error"]
    command += WEIGHTS if model.startswith("dummy:") else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        ready = next(line for line in process.stdout if line.startswith("Ready"))
        yield re.search(r"http://[\d.:]+", ready)[0]
    finally:
        process.terminate()
        process.stdout.read()
        process.wait()


# -------------------------------------------------------------------------------------------------------- the table


def cell(found: list[str]) -> str:
    if not found:
        return ""
    num_passed, failed = found.count(""), any(each.startswith("FAILED") for each in found)
    if num_passed == len(found):
        return f"{num_passed}"
    return f"{num_passed} of {len(found)}" + (" FAILED" if failed else "")


def rows(results: list[dict]) -> list[list[str]]:
    """One for each client and model."""
    made = []
    for result in results:
        for model, found in result["models"].items():
            cells = [cell(found.get(capability, [])) for capability in CAPABILITIES]
            made.append([f"`{result['client']}`", result["version"], model, *cells])
        if why := result.get("not run"):
            made.append([f"`{result['client']}`", "", f"not run: {why}", *[""] * len(CAPABILITIES)])
    return made


def table(results: list[dict]) -> str:
    """As Markdown."""
    head = ["client", "version", "model", *CAPABILITIES]
    lines = [head, ["---"] * len(head), *rows(results)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def record(results: list[dict]) -> None:
    """Each client's newest result."""
    known = {each["client"]: each for each in json.loads(RECORD.read_text())["results"]} if RECORD.exists() else {}
    known |= {each["client"]: each for each in results}
    date, kept = datetime.date.today().isoformat(), list(known.values())
    RECORD.write_text(json.dumps({"schema": "minivllm.clients/1", "date": date, "results": kept}, indent=1) + "\n")
    write_page(kept, date)


def write_page(results: list[dict], date: str) -> None:
    write_between(BEGIN, f"Run on {date}.\n\n{table(results)}", END)


def write_between(begin: str, text: str, end: str) -> None:
    """Of the page, what stands between two marks."""
    before, _, rest = PAGE.read_text().partition(begin)
    after = rest.partition(end)[2]
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def reasons(results: list[dict]) -> Iterator[str]:
    for result in results:
        for model, found in result["models"].items():
            told = {why for each in found.values() for why in each if why}
            yield from (f"{result['client']}, {model}: {why}" for why in sorted(told))


def main() -> int:
    names = sorted({client.name for client in CLIENTS})
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--into", type=Path, default=ROOT / ".clients", help="the environments' folder (.clients)")
    args.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    args.add_argument("--models", nargs="+", default=MODELS, metavar="MODEL")
    args.add_argument("--record", action="store_true", help="write clients.json and the table of docs/clients.md")
    args = args.parse_args()
    results, ready = [], []
    for client in [client for client in CLIENTS if client.name in args.only]:
        environment = Environment(args.into / (client.folder or client.name), client)
        result = {"client": client.title, "version": "", "models": {}}
        results.append(result)
        print(f"installing {client.title}", flush=True)
        try:
            result["version"] = environment.install()
            ready.append((environment, result))
        except NotInstalled as error:
            result["not run"] = str(error)
    for model in args.models:
        with serving(model) as url:
            for environment, result in ready:
                print(f"{model}: {environment.client.title}", flush=True)
                try:
                    result["models"][model] = environment.run(url, model)
                except (NotInstalled, subprocess.TimeoutExpired) as error:
                    result["models"][model] = {"call": [f"FAILED: {error}"]}
    print(table(results), *reasons(results), sep="\n")
    if args.record:
        record(results)
    return int(any(": FAILED: " in line for line in reasons(results)))


if __name__ == "__main__":
    raise SystemExit(main())
