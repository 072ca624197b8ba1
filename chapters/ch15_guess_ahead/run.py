"""Chapter 15: can a step yield more than one token? Guesses that are checked in one pass: what they give and cost.

The same engine with several guessers. All that differs between two answers to one prompt is who guessed, so the tokens
must be the same. Steps that compute a prompt are left out, unless the guesser takes time there as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.common import spread
from chapters.ch15_guess_ahead.texts import TEXTS, Messages
from chapters.crowd import EXACT
from chapters.harness import in_time, main, note
from minivllm import LLM, SamplingParams
from minivllm.config import DEFAULT_MODEL
from minivllm.plan import StepOutput, StepPlan
from minivllm.sampling.draw import BLOCK, draw
from minivllm.sampling.rejection import Rejection

K = 8  # guesses a step, at most
LAYERS = 10  # of the model's thirty that guess as "its first layers"
NUM_NEW, SMOKE_NEW = 24, 16  # tokens of an answer
CROWDS, SMOKE_CROWDS = (4, 16), (8,)  # requests at once, a quarter of them for each text
MIB_EACH = 12  # of K and V for each request of a crowd, in float32
NUM_DRAWS, SMOKE_DRAWS = 20_000, 5_000
# One place of a text as the model sees it, and as somebody guesses it.
P = (0.40, 0.25, 0.15, 0.10, 0.06, 0.04)
Q = (0.10, 0.30, 0.05, 0.35, 0.15, 0.05)


class Step(NamedTuple):
    num_requests: int
    num_guessed: int
    tokens: list[list[int]]  # of each request: the guesses that were right, and one more
    ms: float


class Answers(NamedTuple):
    tokens: list[list[int]]
    steps: list[Step]

    @property
    def num_tokens(self) -> int:
        """Of the steps that are counted."""
        return sum(len(tokens) for step in self.steps for tokens in step.tokens)

    @property
    def num_turns(self) -> int:
        """How often a request took part in a step: what it would have got tokens without guesses."""
        return sum(step.num_requests for step in self.steps)

    @property
    def num_guessed(self) -> int:
        return sum(step.num_guessed for step in self.steps)

    @property
    def ms_a_token(self) -> float:
        return sum(step.ms for step in self.steps) / self.num_tokens


class Watch:
    """An observer of the engine that keeps the steps in which no prompt is computed; `all_steps`: the others too."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.all_steps = False

    def on_step(self, plan: StepPlan, out: StepOutput, deltas: Any, times: dict[str, float]) -> None:
        known = {name: num - len(plan.drafts.get(name, ())) for name, num in plan.num_tokens.items()}
        if known and (self.all_steps or set(known.values()) == {1}):
            tokens = [list(out.tokens.get(name, ())) for name in known]
            self.steps.append(Step(len(known), plan.stats.num_drafted, tokens, sum(times.values())))

    def ignore(self, *_: Any) -> None: ...

    on_start = on_add = on_abort = close = ignore


class Engine:
    """An engine with one guesser."""

    def __init__(self, method: str, adaptive: bool = False, memory: str = "64MiB", **more: Any):
        overrides = {"spec_decode.method": method, "spec_decode.k": K, "spec_decode.adaptive": adaptive}
        overrides |= {"kv.memory": memory, "executor.num_threads": torch.get_num_threads(), **EXACT}
        overrides |= {f"spec_decode.{name}": value for name, value in more.items()}
        self.watch = Watch()
        self.llm = LLM(overrides=overrides, observers=[self.watch])

    def answer(self, asked: Sequence[Messages], num_new: int, temperature: float = 0.0) -> Answers:
        params = SamplingParams(temperature=temperature, seed=0, max_tokens=num_new, ignore_eos=True)
        self.watch.steps = []
        outputs = self.llm.chat(asked, params, add_generation_prompt=False, continue_final_message=True, use_tqdm=False)
        return Answers([list(output.outputs[0].token_ids) for output in outputs], self.watch.steps)

    def close(self) -> None:
        self.llm.shutdown()

    def marked(self, answers: Answers) -> str:
        """The text of one answer, with brackets around guesses that were right."""
        decode, pieces = self.llm.get_tokenizer().decode, []
        for step in answers.steps:
            *guessed, own = step.tokens[0]
            pieces += [f"[{decode(guessed)}]" if guessed else "", decode([own])]
        return "".join(pieces)


def told(mine: list[Answers], plain: list[Answers]) -> dict[str, Any]:
    """One guesser over some rounds, beside nobody's guesses in the same rounds."""
    first = mine[0]
    accepted = first.num_tokens - first.num_turns
    return {
        "tokens_a_step": round(first.num_tokens / first.num_turns, 2),
        "guessed_a_step": round(first.num_guessed / first.num_turns, 2),
        "accepted_percent": round(100 * accepted / max(1, first.num_guessed)),
        "ms_a_token": spread([answers.ms_a_token for answers in mine], 2),
        "speed_up": spread([a.ms_a_token / b.ms_a_token for a, b in zip(plain, mine, strict=True)]),
        "equal": all(a.tokens == b.tokens for a, b in zip(plain, mine, strict=True)),
    }


def compare(
    engines: dict[str, Engine], asked: Sequence[Messages], num_new: int, rounds: int, temperature: float = 0.0
) -> dict[str, list[Answers]]:
    """They take turns, so that whatever else the machine does disturbs all of them alike."""
    found: dict[str, list[Answers]] = {name: [] for name in engines}
    for i in range(rounds):
        for name in list(engines)[:: -1 if i % 2 else 1]:
            found[name].append(engines[name].answer(asked, num_new, temperature))
    return found


def beside(found: dict[str, list[Answers]]) -> dict[str, dict[str, Any]]:
    """Each guesser beside nobody's guesses."""
    return {name: told(mine, found["none"]) for name, mine in found.items() if name != "none"}


def one_after_the_other(runs: Sequence[dict[str, list[Answers]]]) -> dict[str, list[Answers]]:
    """Several comparisons as one, round by round."""

    def joined(parts: Sequence[Answers]) -> Answers:
        return Answers([one for part in parts for one in part.tokens], [step for part in parts for step in part.steps])

    return {name: [joined(parts) for parts in zip(*(run[name] for run in runs), strict=True)] for name in runs[0]}


def crowd(size: int, found: dict[str, list[Answers]]) -> dict[str, Any]:
    largest = max(step.num_requests + step.num_guessed for step in found["always"][0].steps)
    return {"size": size, "largest_step": largest, "plain": 1.0, **beside(found)}


def sampled(none: Engine, ngram: Engine, num_new: int) -> list[dict[str, Any]]:
    """The first text, drawn at rising temperatures: the likely token comes less and less often."""
    rows = []
    for temperature in (0.0, 0.5, 1.0):
        found = compare({"none": none, "ngram": ngram}, [TEXTS["records"]], num_new, 1, temperature)
        row = beside(found)["ngram"]
        names = ("tokens_a_step", "accepted_percent", "equal")
        rows.append({"temperature": temperature, **{name: row[name] for name in names}})
    return rows


def whoever(none: Engine, ngram: Engine, num_new: int) -> dict[str, Any]:
    """The records, guessed by a look-up, by a third of the model, and by all of it.

    The first guesses are made in the step of the prompt. Where guessing takes time, this step counts; the prompt is in
    the prefix cache by then, but for its last tokens.
    """
    note("  one request: other guessers")
    layers, itself = Engine("self_draft", layers=LAYERS), Engine("draft", model=DEFAULT_MODEL)
    engines = {"none": none, "ngram": ngram, "layers": layers, "itself": itself}
    names = {"ngram": "n-gram look-up", "layers": f"its first {LAYERS} layers", "itself": "itself"}
    for engine in engines.values():
        engine.answer([TEXTS["records"]], 2)
        engine.watch.all_steps = True
    found = beside(compare(engines, [TEXTS["records"]], num_new, 1))
    layers.close()
    itself.close()
    itself_row = found["itself"]  # each guess is a pass of the whole model, and so is each step
    itself_row["passes_a_token"] = round((itself_row["guessed_a_step"] + 1) / itself_row["tokens_a_step"], 2)
    return {name: {"name": title, **found[name]} for name, title in names.items()}


def fairness(num_draws: int) -> dict[str, Any]:
    """One place, many times: guesses drawn from Q, through the engine's rejection sampler, against P."""
    p, q = (torch.nn.functional.pad(torch.tensor(row), (0, BLOCK - len(row))) for row in (P, Q))
    accept = Rejection(lambda row, place: q)
    seen, num_accepted, chunk = torch.zeros(BLOCK, dtype=torch.long), 0, 500
    for start in range(0, num_draws, chunk):
        seeds, at = np.arange(start, start + chunk, dtype=np.uint64), np.full(chunk, 7)
        guesses = draw(q.repeat(chunk, 1), seeds, np.full(chunk, 8))[0]
        which = np.arange(chunk)
        tokens, _ = accept(guesses.numpy(), which, np.zeros(chunk, np.int64))(p.repeat(chunk, 1), seeds, at, which)
        seen += torch.bincount(tokens, minlength=BLOCK)
        num_accepted += int((tokens == guesses).sum())
    both = torch.minimum(p, q)
    naive = both + (1 - both.sum()) * p  # what a fresh draw from p after each refusal would give, exactly
    expected = num_draws * p[: len(P)]
    return {
        "num_draws": num_draws,
        "rows": [
            {
                "token": i + 1,
                "guessed": round(100 * Q[i]),
                "right": round(100 * P[i]),
                "seen": round(100 * int(seen[i]) / num_draws, 2),
                "naive": round(100 * float(naive[i]), 2),
            }
            for i in range(len(P))
        ],
        "chi_square": round(float(((seen[: len(P)] - expected) ** 2 / expected).sum()), 2),
        "naive_chi_square": round(float(num_draws * ((naive - p)[: len(P)] ** 2 / p[: len(P)]).sum())),
        "degrees": len(P) - 1,
        "accepted_percent": round(100 * num_accepted / num_draws, 1),
        "possible_percent": round(100 * float(both.sum()), 1),
    }


def measure(smoke: bool) -> dict[str, Any]:
    # Of one round a neighbour's burst of work can be the whole; of three the median holds.
    num_new, rounds, sizes = (SMOKE_NEW, 3, SMOKE_CROWDS) if smoke else (NUM_NEW, 2, CROWDS)
    memory = f"{MIB_EACH * sizes[-1]}MiB"
    note("  loading engines")
    none, always, adaptive = (Engine(*how, memory) for how in (("none", False), ("ngram", False), ("ngram", True)))
    engines = {"none": none, "always": always, "adaptive": adaptive}
    for engine in engines.values():
        engine.answer([TEXTS["story"]], 2)  # the first forwards of an engine are slower than the others
    alone = {}
    for name, messages in TEXTS.items():
        note(f"  one request: {name}")
        alone[name] = compare(engines, [messages], num_new, rounds)
    crowds = [crowd(1, one_after_the_other(list(alone.values())))]
    for size in sizes:
        note(f"  {size} requests at once")
        asked = [messages for _ in range(size // len(TEXTS)) for messages in TEXTS.values()]
        crowds.append(crowd(size, compare(engines, asked, num_new, rounds)))
    heat = sampled(none, always, num_new)
    adaptive.close()
    who = whoever(none, always, num_new)
    marked = {name: always.marked(found["always"][0]) for name, found in alone.items()}
    none.close()
    always.close()
    note("  the rejection sampler, many times")
    return {
        "model": DEFAULT_MODEL,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "k": K,
        "layers": LAYERS,
        "num_new": num_new,
        "texts": {name: {**beside(found), "marked": marked[name]} for name, found in alone.items()},
        "sampled": heat,
        "crowds": crowds,
        "who": who,
        "fair": fairness(SMOKE_DRAWS if smoke else NUM_DRAWS),
    }


def check(results: dict[str, Any]) -> None:
    """What the text claims, true on any machine."""
    texts, crowds, who, fair = (results[name] for name in ("texts", "crowds", "who", "fair"))
    rows = [row[name] for row in (*texts.values(), *crowds) for name in ("always", "adaptive")]
    rows += [*results["sampled"], *who.values()]
    assert all(row["equal"] for row in rows), "a guess changed the output"
    given = {name: row["always"]["tokens_a_step"] for name, row in texts.items()}
    assert given["records"] > 2, "guessing does not help to copy"
    in_time(
        texts["records"]["always"]["speed_up"]["median"] > 1, "a step with guesses takes as much longer as it gives"
    )
    assert given["story"] < 0.6 * given["records"], "the look-up knows what nobody has written yet"
    heat = [row["accepted_percent"] for row in results["sampled"]]
    assert heat[0] > heat[-1], "drawn tokens are guessed as well as likely ones"
    assert who["itself"]["accepted_percent"] > 80 > who["layers"]["accepted_percent"], "the model does not know itself"
    assert who["itself"]["passes_a_token"] >= 0.99, "the model guesses for itself with fewer passes than it writes"
    first, last = crowds[0], crowds[-1]
    in_time(last["always"]["speed_up"]["median"] < first["always"]["speed_up"]["median"], "a full step has room too")
    assert last["adaptive"]["guessed_a_step"] < last["always"]["guessed_a_step"], "the throttle lets everything through"
    assert last["adaptive"]["guessed_a_step"] < first["adaptive"]["guessed_a_step"], "the throttle sees no company"
    # Chi-square with 5 degrees of freedom is above 36 once in a million draws of this many.
    assert fair["chi_square"] < 36 < fair["naive_chi_square"], "the rejection sampler is not fair"
    assert abs(fair["accepted_percent"] - fair["possible_percent"]) < 4


def tell(results: dict[str, Any]) -> str:
    lines = [
        f"one request, at most {results['k']} guesses a step, {results['num_new']} tokens:",
        "",
        "                        tokens   guesses  of these   times as fast",
        "                        a step    a step  accepted  as without them",
    ]
    lines += [f"{text:22}" + figures(row["always"]) for text, row in results["texts"].items()]
    lines += ["", "the records, guessed by"]
    lines += [f"{row['name']:22}" + figures(row) for row in results["who"].values()]
    lines += ["", "the records, in brackets what the look-up had guessed:", ""]
    lines += [f"    {line}" for line in results["texts"]["records"]["marked"].splitlines()]
    lines += ["", "records, drawn at a temperature:"]
    lines += [
        f"{row['temperature']:7.1f}: {row['tokens_a_step']:4.2f} tokens a step, {row['accepted_percent']:3} % accepted"
        for row in results["sampled"]
    ]
    lines += [
        "",
        "requests   tokens in the    faster, if always guessing   if only where it pays",
        "at once     largest step",
    ]
    for row in results["crowds"]:
        lines.append(
            f"{row['size']:8} {row['largest_step']:14} {row['always']['speed_up']['median']:24.2f}"
            f"{row['adaptive']['speed_up']['median']:26.2f}"
        )
    fair = results["fair"]
    lines += [
        "",
        f"{fair['num_draws']:,} places with rejection: chi-square {fair['chi_square']} at {fair['degrees']} degrees, "
        f"{fair['accepted_percent']} % accepted",
        "every answer has the tokens that it has without guesses",
    ]
    return "\n".join(lines) + "\n"


def figures(row: dict[str, Any]) -> str:
    return (
        f"{row['tokens_a_step']:8.2f} {row['guessed_a_step']:9.2f} {row['accepted_percent']:7} % "
        f"{row['speed_up']['median']:16.2f}"
    )


if __name__ == "__main__":
    main("15", measure, check, tell)
