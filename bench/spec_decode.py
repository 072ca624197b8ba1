"""What does speculative decoding gain at one request, in tokens per forward and in speed?

Against the same engine without it. Text that copies (quotes of an article, a code edit, JSON records) and free text,
through the chat template, greedily. Engines are loaded side by side and take turns on each prompt, so that a noisy
minute of the machine meets all of them; a speed-up is a ratio within a round. `same` says in how many rounds the tokens
were those without speculation: all in float32; in bfloat16 a forward over several tokens rounds differently, and a near
tie may fall the other way.

    python -m bench spec_decode --methods ngram suffix --rounds 5
"""

from __future__ import annotations

import statistics
from typing import Any

from common import emit, note, parser, spread
from texts import COPYING, FREE

from minivllm import LLM, SamplingParams
from minivllm.config import DEFAULT_MODEL, parse_set


class Engine:
    def __init__(self, method: str, args: Any):
        overrides = {"spec_decode.method": method, "kv.prefix": "none", "kv.memory": "512MB"}
        # Rounds repeat their prompts: an engine that remembered its earlier outputs would be asked what it knows.
        overrides |= {"spec_decode.k": args.k, "spec_decode.suffix_tokens": 0}
        if args.threads:
            overrides["executor.num_threads"] = args.threads
        self.llm = LLM(args.model, dtype=args.dtype, overrides=overrides | parse_set(args.set))

    def answer(self, prompt: tuple[str, str], num_tokens: int) -> dict[str, Any]:
        """Milliseconds a token after the first (speculation does nothing for the prefill), and counters."""
        said, begun = prompt
        messages = [{"role": "user", "content": said}, {"role": "assistant", "content": begun}]
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        before = self._counters()
        how = {"add_generation_prompt": False, "continue_final_message": True, "use_tqdm": False}
        output = self.llm.chat(messages, params, **how)[0]
        steps, drafted, accepted = (b - a for a, b in zip(before, self._counters(), strict=True))
        tokens = list(output.outputs[0].token_ids)
        decode = output.metrics.last_token_time - output.metrics.first_token_time
        return {
            "ms": 1e3 * decode / (len(tokens) - 1),
            "steps": steps - 1,  # without the prefill
            "drafted": drafted,
            "accepted": accepted,
            "tokens": tokens,
        }

    def _counters(self) -> tuple[int, int, int]:
        stats = self.llm._core.stats
        return stats.num_steps, stats.num_drafted, stats.num_accepted


def measure(engines: dict[str, Engine], prompt: tuple[str, str], args: Any) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for i in range(args.rounds + 1):
        names = list(engines)[:: 1 if i % 2 else -1]
        for name in names:
            runs[name].append(engines[name].answer(prompt, args.num_tokens))
    plain = runs["none"][1:]  # the first round warms up
    found: dict[str, Any] = {"ms_per_token": spread([run["ms"] for run in plain], 2)}
    for name in args.methods:
        mine = runs[name][1:]
        total = {key: sum(run[key] for run in mine) for key in ("steps", "drafted", "accepted")}
        found[name] = {
            "speedup": spread([p["ms"] / m["ms"] for p, m in zip(plain, mine, strict=True)]),
            "speedup_of_best": round(min(p["ms"] for p in plain) / min(m["ms"] for m in mine), 3),
            "tokens_per_step": round(sum(len(run["tokens"]) - 1 for run in mine) / total["steps"], 3),
            "drafts_per_step": round(total["drafted"] / total["steps"], 3),
            "accepted_per_draft": round(total["accepted"] / max(1, total["drafted"]), 3),
            "same": f"{sum(p['tokens'] == m['tokens'] for p, m in zip(plain, mine, strict=True))}/{len(mine)}",
        }
    return found


def main() -> None:
    options = parser(__doc__.splitlines()[0], "spec_decode")
    options.add_argument("--model", default=DEFAULT_MODEL)
    options.add_argument("--dtype", default="auto")
    options.add_argument("--methods", nargs="+", default=["ngram", "suffix"])
    options.add_argument("--k", type=int, default=8)
    options.add_argument("--num-tokens", type=int, default=120)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--threads", type=int, default=0, help="0: as many as the engine takes")
    options.add_argument("--only", nargs="+", default=[*COPYING, *FREE])
    options.add_argument("--set", action="append", default=[])
    args = options.parse_args()
    engines = {name: Engine(name, args) for name in ("none", *args.methods)}
    results: dict[str, Any] = {}
    for name, prompt in {**COPYING, **FREE}.items():
        if name in args.only:
            results[name] = measure(engines, prompt, args)
            note(f"{name}: {results[name]}")
    for kind, group in (("copying", COPYING), ("free", FREE)):
        ran = [results[name] for name in group if name in results]
        for method in args.methods if ran else ():
            for ratio in ("speedup", "speedup_of_best"):
                found = [r[method][ratio]["median"] if ratio == "speedup" else r[method][ratio] for r in ran]
                results.setdefault(f"{kind}, {method}", {})[ratio] = round(statistics.geometric_mean(found), 3)
    emit("spec_decode", vars(args), results, args.out)


if __name__ == "__main__":
    main()
