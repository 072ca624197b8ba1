"""Chapter 16: how is the JSON always valid? The same questions, with a grammar's mask over the logits and without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from chapters.ch16_only_legal_tokens import costs, masks
from chapters.harness import in_time, main, note
from minivllm import LLM, SamplingParams, StructuredParams
from minivllm.config import DEFAULT_MODEL
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.engine.vocabulary import make_vocabulary
from minivllm.features import GRAMMARS
from minivllm.loading import load_model
from minivllm.structured.automaton import DEAD, START
from minivllm.structured.compiler import is_installed

KINDS = {"name": str, "age": int, "city": str}
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
PROPERTIES = {"name": STRING, "age": INTEGER, "city": STRING}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES)}
HELD = StructuredParams(json=SCHEMA)
FACTS: dict[str, tuple[str, int, str]] = {  # what is said, and what should come of it
    "Ada is 36 years old and lives in London.": ("Ada", 36, "London"),
    "Ben, 52, has moved from Oslo to Rome.": ("Ben", 52, "Rome"),
    "In Kyoto there lives a girl of 8. Her name is Cleo.": ("Cleo", 8, "Kyoto"),
    "Dan was 19 when he left Lima. That was ten years ago, and he has been in Boston since.": ("Dan", 29, "Boston"),
    "Eve turned 71 in Paris, where she was born and still lives.": ("Eve", 71, "Paris"),
    "Finn is two years older than Gil, who is 40. Finn lives in Berlin.": ("Finn", 42, "Berlin"),
}
ASK = 'Write this as JSON with the keys "name", "age" and "city".'
TEMPERATURES, SMOKE_TEMPERATURES = (0.0, 0.5, 1.0, 1.5), (0.0, 1.0)
SEEDS, SMOKE_SEEDS = (1, 2, 3, 4), (1,)  # greedy answers need one
SMOKE_EVERY = 3  # third fact alone
MAX_TOKENS = 48
LIMITS = (8, 12, 16, 20, 24, 32, 40, MAX_TOKENS)

QUESTION = "Is a whale a fish?"
CHOICES = StructuredParams(choice=["Yes.", "No.", "I do not know."])

COSTS = {
    "one_by_one": "found, every token by itself",
    "tree": "found, down the tree",
    "kept": "found again",
    "applied": "applied to a row of logits",
    "forward": "a forward pass of one token",
}
BOUNDED = {**STRING, "maxLength": 200}
SPECIFICATIONS = {
    "a date": StructuredParams(regex=r"\d{4}-\d{2}-\d{2}"),
    "three words": StructuredParams(choice=["positive", "negative", "neutral"]),
    "the schema": HELD,
    "the same with maxLength 200": StructuredParams(
        json={**SCHEMA, "properties": {"name": BOUNDED, "age": INTEGER, "city": BOUNDED}}
    ),
}


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def fits(value: Any) -> bool:
    """An instance of SCHEMA."""
    return isinstance(value, dict) and value.keys() == KINDS.keys() and all(type(value[k]) is KINDS[k] for k in KINDS)


def fished_out(text: str) -> str:
    """From the first brace to the last: what a program that has to use such answers tries."""
    return text[text.find("{") : text.rfind("}") + 1]


def ask_all(
    llm: LLM, facts: Sequence[str], temperatures: Sequence[float], seeds: Sequence[int], ways: Sequence[bool]
) -> list[dict[str, Any]]:
    """Each fact at each temperature with each seed, held to the schema or not. All are one batch."""
    cases = [
        {"fact": fact, "temperature": temperature, "seed": seed, "held": held}
        for temperature in temperatures
        for seed in (seeds if temperature else seeds[:1])
        for fact in facts
        for held in ways
    ]
    chats = [[{"role": "user", "content": f"{case['fact']}\n{ASK}"}] for case in cases]
    params = [
        SamplingParams(
            temperature=case["temperature"],
            seed=case["seed"],
            max_tokens=MAX_TOKENS,
            structured=HELD if case["held"] else None,
        )
        for case in cases
    ]
    outputs = llm.chat(chats, params, use_tqdm=False)
    return [case | judged(case["fact"], output) for case, output in zip(cases, outputs, strict=True)]


def judged(fact: str, output: Any) -> dict[str, Any]:
    """fits: the whole answer is an instance. fished: what is between its braces is. right: and says what it should."""
    answer = output.outputs[0]
    value = parsed(fished_out(answer.text))
    return {
        "prompt": list(output.prompt_token_ids),
        "text": answer.text,
        "tokens": list(answer.token_ids),
        "is_cut": answer.finish_reason == "length",
        "fits": fits(parsed(answer.text)),
        "fished": fits(value),
        "right": fits(value) and tuple(value[key] for key in KINDS) == FACTS[fact],
    }


def percent(values: Sequence[bool]) -> float:
    return round(100 * sum(values) / len(values), 1)


def summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    free, held = ([a for a in answers if a["held"] is is_held] for is_held in (False, True))
    return {
        "num": len(held),
        "free": percent([a["fits"] for a in free]),
        "fished": percent([a["fished"] for a in free]),
        "held": percent([a["fits"] for a in held]),
        "num_cut": sum(a["is_cut"] for a in held),
        "num_cut_in_string": sum(a["is_cut"] and a["text"].replace('\\"', "").count('"') % 2 for a in held),
        "free_right": percent([a["right"] for a in free]),
        "held_right": percent([a["right"] for a in held]),
    }


def within(held: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What would have been valid with fewer tokens: a draw does not depend on how many may follow."""
    return [{"limit": n, "valid": percent([a["fits"] and len(a["tokens"]) <= n for a in held])} for n in LIMITS]


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """One answer, as a page shows it: in one line."""
    return {"fact": answer["fact"], "text": " ".join(answer["text"].split()), "temperature": answer["temperature"]}


def started(**more: Any) -> LLM:
    """With the backend that every installation has."""
    overrides = {"kv.memory": "512MiB", "executor.num_threads": torch.get_num_threads(), "structured.backend": "dfa"}
    return LLM(dtype="float32", quantization="none", overrides=overrides | more)


def ask_with_guesses(wanted: list[dict[str, Any]]) -> dict[str, Any]:
    """The greedy questions once more, with speculation: the same tokens?"""
    facts = [answer["fact"] for answer in wanted]
    with started(**{"spec_decode.method": "ngram", "spec_decode.k": 4, "spec_decode.adaptive": False}) as llm:
        held = ask_all(llm, facts, (0.0,), SEEDS, (True,))
        stats = llm.stats
    equal = [a["tokens"] for a in held] == [a["tokens"] for a in wanted]
    return {"equal": equal, "drafted": stats.num_drafted, "accepted": stats.num_accepted}


def measure(smoke: bool) -> dict[str, Any]:
    temperatures, seeds = (SMOKE_TEMPERATURES, SMOKE_SEEDS) if smoke else (TEMPERATURES, SEEDS)
    facts = list(FACTS)[:: SMOKE_EVERY if smoke else 1]
    note("  every question twice, in one batch: free, and held to a schema")
    with started() as llm:
        answers = ask_all(llm, facts, temperatures, seeds, (False, True))
    held = [a for a in answers if a["held"]]
    greedy = [a for a in held if not a["temperature"]]
    note("  the greedy ones once more, with guesses")
    guesses = ask_with_guesses(greedy)

    loaded = load_model(DEFAULT_MODEL, torch.float32, "cpu", quantization="none")
    tokenizer = TextTokenizer.load(loaded.tokenizer_dir)
    model, vocabulary = loaded.model, make_vocabulary(tokenizer, loaded.spec.vocab_size)
    compiled = costs.compiler_of(vocabulary).compile(HELD)
    ends = [compiled.dfa.next(START, masks.bytes_of(vocabulary, a["tokens"])) for a in held]
    note("  what the masks left of the model's own probabilities")
    walks = [masks.along(model, vocabulary, compiled, a["prompt"], a["tokens"]) for a in greedy]
    steps = [row for walk in walks for row in walk]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}])
    prompt, choices = tokenizer.encode(chat, add_special_tokens=False), costs.compiler_of(vocabulary).compile(CHOICES)
    said = masks.chances(model, vocabulary, choices, prompt, CHOICES.choice)
    note("  what masks cost")
    in_a_string = compiled.dfa.next(START, b'{"name": "A')
    cost = costs.one_mask(model, vocabulary, compiled, in_a_string, 1.0 if smoke else 5.0)
    rounds = 2 if smoke else 9
    return {
        "model": DEFAULT_MODEL,
        "threads": torch.get_num_threads(),
        "vocab_size": len(vocabulary),
        "num_facts": len(facts),
        "max_tokens": MAX_TOKENS,
        "rows": [{"temperature": t, **summary([a for a in answers if a["temperature"] == t])} for t in temperatures],
        "total": summary(answers),
        "ended_invalid": sum(not a["fits"] for a in held if not a["is_cut"]),
        "left_the_grammar": sum(end == DEAD for end in ends),
        "within": within(held),
        "free_example": next((told(a) for a in answers if not a["held"] and not a["fits"]), None),
        "held_example": told(greedy[0]),
        "wrong_example": next((told(a) for a in held if a["fits"] and not a["right"]), None),
        "cut_example": next((told(a) for a in reversed(held) if a["is_cut"]), None),
        "walk": walks[0],
        "steps": {
            "num": len(steps),
            "single": sum(row["forced"] and row["legal"] == 1 for row in steps),
            "forced": sum(row["forced"] for row in steps),
            "overruled": sum(row["overruled"] for row in steps),
            "least_mass": min(row["mass"] for row in steps),
        },
        "guesses": guesses,
        "question": QUESTION,
        "chances": said,
        "own_chances": {row["text"]: row["own"] for row in said},
        "mask_bytes": 4 * vocabulary.num_words,
        "logits_bytes": 4 * len(vocabulary),
        "cost": cost,
        "backends": {
            name: costs.of_backend(name, vocabulary, HELD, greedy[0]["tokens"], rounds)
            for name in GRAMMARS.names()
            if is_installed(GRAMMARS.get(name))
        },
        "compiling": costs.compiling(vocabulary, SPECIFICATIONS, rounds),
        "refusal": costs.refusal(vocabulary, StructuredParams(json_object=True)),
    }


def check(results: dict[str, Any]) -> None:
    """What the text claims, true on any machine."""
    total, steps, cost = results["total"], results["steps"], results["cost"]
    assert results["ended_invalid"] == 0, "a held answer ended by itself and is no instance"
    assert results["left_the_grammar"] == 0, "a held answer cannot be completed to an instance"
    assert total["held"] > total["free"], "the mask makes no difference"
    assert results["rows"][0]["fished"] >= results["rows"][-1]["fished"], "the hotter, the more valid"
    valid = [row["valid"] for row in results["within"]]
    assert valid == sorted(valid) and valid[0] < valid[-1] == total["held"], "a limit on tokens costs nothing"
    assert total["held_right"] < total["held"], "whatever is valid is right"
    legal = [row["legal"] for row in results["walk"]]
    assert 100 * min(legal) < max(legal) < results["vocab_size"], "as many tokens are legal everywhere"
    assert 0 < steps["overruled"] < steps["num"] and steps["single"] < steps["forced"]
    assert results["guesses"]["equal"] and results["guesses"]["drafted"] > 0, "a guess changed an answer"
    assert max(abs(row["masked"] - row["own"]) for row in results["chances"]) > 1, "the mask keeps the distribution"
    assert results["chances"][-1]["masked"] > results["chances"][-1]["own"], "a likely beginning helps nobody"
    assert 32 * results["mask_bytes"] == results["logits_bytes"]
    found = [cost[name]["min"] for name in ("kept", "tree", "one_by_one")]
    in_time(found == sorted(found) and 10 * found[0] < found[1] < found[2] / 10, "a mask costs the same either way")
    in_time(
        results["backends"]["dfa"]["again"]["min"] < results["backends"]["dfa"]["first"]["min"],
        "what was compiled is compiled again",
    )
    states = [row["states"] for row in results["compiling"]]
    assert states == sorted(states) and states[-1] > 10 * states[-2], "longer strings need no more states"
    assert "no regular language" in results["refusal"]


def tell(results: dict[str, Any]) -> str:
    lines = [*tell_answers(results), "", *tell_masks(results), "", *tell_costs(results)]
    return "\n".join(lines) + "\n"


def tell_answers(results: dict[str, Any]) -> list[str]:
    lines = [
        f"{results['num_facts']} questions, answered free and held to a schema, {results['max_tokens']} tokens at most",
        "",
        "temper-            valid, of all answers             right",
        "ature   answers    free  fished out    held (cut)    free    held",
    ]
    for name, row in [*((f"{row['temperature']:.1f}", row) for row in results["rows"]), ("all", results["total"])]:
        lines.append(
            f"{name:7} {row['num']:7} {row['free']:6.0f} % {row['fished']:9.0f} % {row['held']:5.0f} % "
            f"{row['num_cut']:5} {row['free_right']:6.0f} % {row['held_right']:5.0f} %"
        )
    for name in ("free", "held", "wrong", "cut"):
        if example := results[f"{name}_example"]:
            text = example["text"]
            lines += ["", f"{name}: {example['fact']}", f"      {text[:80]}{' ...' if len(text) > 80 else ''}"]
    return lines


def tell_masks(results: dict[str, Any]) -> list[str]:
    steps, guesses = results["steps"], results["guesses"]
    lines = [f"the first held answer, token[how many of {results['vocab_size']:,} were legal]:", "    "]
    for row in results["walk"]:
        piece = f"{row['text'].strip() or repr(row['text'])}[{row['legal']}] "
        if len(lines[-1]) + len(piece) > 90:
            lines.append("    ")
        lines[-1] += piece
    lines = [line.rstrip() for line in lines]
    lines += [
        "",
        f"the greedy answers have {steps['num']} tokens",
        f"    the model's first choice was not legal: {steps['overruled']} times",
        f"    only one byte could follow, {steps['forced']} times; only one token, {steps['single']} times",
        f"    with guesses: the same tokens, {guesses['accepted']} of {guesses['drafted']} guesses taken",
        "",
        f"{results['question']:25} under the mask    the model by itself",
    ]
    lines += [f"    {row['text']:25} {row['masked']:8.1f} % {row['own']:18.1f} %" for row in results["chances"]]
    return lines


def tell_costs(results: dict[str, Any]) -> list[str]:
    lines = [f"one mask ({results['mask_bytes']:,} bytes, for {results['logits_bytes']:,} of logits):"]
    lines += [f"    {what:32} {results['cost'][name]['min']:10.4f} ms" for name, what in COSTS.items()]
    lines += ["", "backend       compile   a mask, first   again (ms)"]
    lines += [
        f"{name:12} {of['compile']['median']:8.2f} {of['first']['median']:15.3f} {of['again']['median']:7.4f}"
        for name, of in results["backends"].items()
    ]
    lines += ["", "compiled in-house             states        ms"]
    lines += [f"{row['what']:28} {row['states']:7} {row['ms']['median']:9.1f}" for row in results["compiling"]]
    return [*lines, "", f"and what it refuses: {results['refusal']}"]


if __name__ == "__main__":
    main("16", measure, check, tell)
