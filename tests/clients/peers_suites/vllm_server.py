"""`vllm serve` as vLLM's tests call it, which starts minivllm: options translated, models replaced by those at hand.

run.py puts an executable `vllm` on the tests' PATH that calls main(). What minivllm does not have, it refuses itself;
Refused is what it cannot be asked for.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence

GENERATES, EMBEDS = "PEERS_GENERATES", "minilm"  # or a variable that names it
CROSS_ENCODES, CLASSIFIES = "PEERS_CROSS_ENCODER", "PEERS_CLASSIFIER"
CONTEXT = {GENERATES: 2048, EMBEDS: 512, CROSS_ENCODES: 512, CLASSIFIES: 512}  # 2048: what nothing ends is ended soon
EMBEDDERS = ("e5", "bge", "gte", "embed", "minilm", "arctic")
CROSS_ENCODERS = ("rerank",)
CLASSIFIERS = ("apeach",)

# What vLLM needs on a GPU, for models from the Hub or for its own parts, and what is always so here.
DROPPED = {
    "--enforce-eager": 0,
    "--trust-remote-code": 0,
    "--enable-auto-tool-choice": 0,
    "--enable-metrics": 0,
    "--enable-prompt-tokens-details": 0,
    "--enable-tokenizer-info-endpoint": 0,
    "--disable-log-stats": 0,
    "--disable-frontend-multiprocessing": 0,
    "--no-async-scheduling": 0,
    "--exclude-tools-when-tool-choice-none": 0,
    "--no-cohere-is-reasoning-model": 0,
    "--dtype": 1,
    "--gpu-memory-utilization": 1,
    "--load-format": 1,
    "--model-impl": 1,
    "--runner": 1,
    "--tokenizer": 1,
    "--shutdown-timeout": 1,
    "--tensor-parallel-size": 1,
    "--reasoning-config": 1,
    "--attention-backend": 1,
    "--hf-overrides": 1,
    "--limit-mm-per-prompt": 1,
    "--show-hidden-metrics-for-version": 1,
    "--enable-request-id-headers": 0,
    "--enable-server-load-tracking": 0,
}
RENAMED = {"--api-server-count": "--api-servers"}


class Refused(Exception):
    """An option that minivllm has nothing for."""


def translated(given: Sequence[str]) -> list[str]:
    """The arguments of `minivllm.serve` for those of `vllm serve`. Raises Refused."""
    name, rest = given[0], list(given[1:])
    model = model_for(name)
    made, names = ["--model", os.environ.get(model, model)], []
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if equals:
            rest.insert(0, value)
        option = option.replace("_", "-")
        option = RENAMED.get(option, option)
        if option in DROPPED:
            del rest[: DROPPED[option]]
        elif option == "--model":
            name = rest.pop(0)
        elif option == "--served-model-name":
            names = take_values(rest)
        elif option == "--max-model-len":
            made += [option, str(min(int(rest.pop(0)), CONTEXT[model]))]
        elif option == "--reasoning-parser":
            made += [option, reasoning_parser(rest.pop(0))]
        elif option == "--chat-template":
            template = template_file(rest.pop(0))
            made += [] if model == EMBEDS else [option, template]  # which it does not have for conversations
        else:
            made += [option, *take_values(rest)]
    return [*made, "--served-model-name", *(names or [name]), "--log-level", "warning", "--metrics-prefix", "vllm"]


def take_values(rest: list[str]) -> list[str]:
    """What stands before the next option, taken out."""
    end = next((i for i, each in enumerate(rest) if each.startswith("--")), len(rest))
    values = rest[:end]
    del rest[:end]
    return values


def template_file(given: str) -> str:
    """Of a template, which may be given as its text."""
    if "{" not in given:
        return given
    with tempfile.NamedTemporaryFile("w", suffix=".jinja", delete=False) as file:
        file.write(given)
    return file.name


def reasoning_parser(name: str) -> str:
    from minivllm.serve import reasoning

    if name not in reasoning.REASONING_PARSERS.names():
        raise Refused(f"--reasoning-parser {name}")
    return name


def model_for(name: str) -> str:
    lower = name.lower()
    if any(part in lower for part in CROSS_ENCODERS):
        return CROSS_ENCODES
    if any(part in lower for part in CLASSIFIERS):
        return CLASSIFIES
    return EMBEDS if any(part in lower for part in EMBEDDERS) else GENERATES


def main() -> None:
    if sys.argv[1] != "serve":
        sys.exit(f"refused: vllm {sys.argv[1]}")
    try:
        command = [sys.executable, "-u", "-m", "minivllm.serve", *translated(sys.argv[2:])]
    except Refused as error:
        sys.exit(f"refused: {error}")
    if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        command += ["--lora-dir", "/"]
    if key := os.environ.get("VLLM_API_KEY"):
        os.environ["MINIVLLM_API_KEY"] = key
    print(*command, flush=True)
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
