"""Which of transformers' decoders run by its own code in the engine, and give its tokens?

Each *ForCausalLM class of the installed version is built tiny with random weights, run and compared in fp32.

    python -m bench any_model                      # all, and the page's record: bench/results/any_model.json
    python -m bench any_model --only PhiForCausalLM,BloomForCausalLM  # what they are now; the rest as it was

A class is "equal" if the log-probabilities of its whole vocabulary at each place of a prompt are transformers' to 1e-4
(of the largest, if that is above 1) and its greedy tokens are the same, in an engine with paged blocks whose prompts
come in chunks and beside each other. It is "refused" if the engine says in a sentence that it does not serve it, which
the record keeps; "different" and "failed" are defects. Each runs in a process of its own, with a limit of time: no
crash ends the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "any_model.json"
DOCS_PAGE = Path(__file__).parent.parent / "docs" / "models_transformers.md"
LIMIT = 120  # seconds a class
NEAR = 1e-4
NUM_TOKENS = 16
PROMPTS = (7, 40, 22)  # lengths; a step takes 16 tokens, so the longest comes in chunks
ENGINE = {
    **{"model.dtype": "float32", "model.network": "transformers", "kv.num_blocks": 200, "kv.block_size": 4},
    **{"executor.num_threads": 1, "engine.core": "inproc", "scheduler.max_num_seqs": 4, "debug.check": True},
    **{"scheduler.max_num_batched_tokens": 16, "engine.max_logprobs": -1},
}
VOCABULARY = 320
ENDINGS = ("ForCausalLM", "LMHeadModel")
# Sizes by the names that configs have for them. A config gets those that it knows.
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256},
    **{"initializer_range": 0.2, "init_std": 0.2, "sliding_window": 8, "pad_token_id": 0, "bos_token_id": 1},
    **{"eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2},
    **{"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "q_lora_rank": 24, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "qk_head_dim": 24, "v_head_dim": 16, "is_decoder": True},
    **{"decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "d_model": 64, "ffn_dim": 96},
    **{"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "word_embed_proj_dim": 64},
    **{"rotary_dim": 8, "n_positions": 256, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 96, "max_seq_len": 256},
    **{"embedding_size": 64, "query_pre_attn_scalar": 16, "hidden_size_per_layer_input": 8},
    **{"vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0, "moe_topk": 2, "moe_layer_start_index": 1},
    **{
        "type_vocab_size": 2,
        "expert_ffn_hidden_size": 32,
        "mlp_ffn_size": 96,
        "ffn_hidden_size": 96,
        "zero_expert_num": 0,
    },
}
BUILT = {"outcome": "failed"}  # so far: what is left to do is the engine's
IMPORTS = ("transformers.conversion_mapping", "transformers.models.llama.modeling_llama", "minivllm.engine.llm")
IMPORTS += ("minivllm.engine.build.worker", "minivllm.models.transformers_any")
TITLES = {  # of an outcome's table, and of its second column
    "equal": ("Equal", ""),
    "refused": ("Refused", "why"),
    "different": ("Different", "what"),
    "failed": ("Failed", "how"),
    "not built": ("Not tried", "what stood in the way of a tiny model"),
}
PAGE = """# Models by transformers' own code

What [the way for any other decoder](models.md#any-other-decoder-by-transformers-own-code) does with the classes that
transformers {transformers} lists for causal language models: of {known}, {count} were tried, and {equal} give its
numbers. Each is built tiny with random weights, in fp32, and served with paged blocks, prompts in chunks of 16 tokens
beside each other, and prefixes found again. Equal means: the log-probabilities of the whole vocabulary at each place
of three prompts are within {near:g} of the largest of transformers' own, and 16 greedy tokens behind each are the same.
`python -m bench any_model` makes this page of what it finds (bench/any_model).
"""
# What single classes need beside.
OWN: dict[str, dict[str, Any]] = {
    "HrmTextForCausalLM": {"initializer_range": 0.05},  # runs its layers again and again, and with them roundings
    "GPTNeoForCausalLM": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench any_model", description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="classes, with commas between them")
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
    parser.add_argument("--output", default=str(RESULT), help="a file, or - for none")
    asked = parser.parse_args()
    names = asked.only.split(",") if asked.only else class_names()
    found = {}
    for name in names:
        found[name] = outcome = in_a_process(name)
        print(f"{name:36} {outcome['outcome']:10} {outcome.get('why', '')}", flush=True)
    print(dict(Counter(outcome["outcome"] for outcome in found.values())))
    if asked.output != "-":
        write(Path(asked.output), found)
    if asked.output == str(RESULT):
        DOCS_PAGE.write_text(page_of(json.loads(RESULT.read_text())))


def class_names() -> list[str]:
    """Of decoders that transformers has: each once."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as named

    names = {name for of in named.values() for name in ([of] if isinstance(of, str) else of)}
    return sorted(
        name for name in names if name.endswith(("ForCausalLM", "LMHeadModel")) and hasattr(transformers, name)
    )


def write(path: Path, found: dict[str, dict[str, Any]]) -> None:
    """The record, in which classes that were not asked for keep what an earlier run found."""
    from bench.common import record

    earlier = json.loads(path.read_text())["results"]["classes"] if path.is_file() else {}
    classes = dict(sorted({**earlier, **found}.items()))
    counts = dict(Counter(of["outcome"] for of in classes.values()))
    results = {"near": NEAR, "known": len(class_names()), "counts": counts, "classes": classes}
    path.write_text(json.dumps(record("any_model", {"limit": LIMIT}, results), indent=1) + "\n")


def page_of(record: dict[str, Any]) -> str:
    """docs/models_transformers.md. record: that of bench/results."""
    classes, near = record["results"]["classes"], record["results"]["near"]
    of: dict[str, list[str]] = {outcome: [] for outcome in TITLES}
    for name, found in classes.items():
        of[found["outcome"]].append(name)
    head = {"equal": len(of["equal"]), "count": len(classes), "known": record["results"]["known"], "near": near}
    parts = [PAGE.format(**head, **record["versions"])]
    parts.append(f"## Equal: {len(of['equal'])}\n\n{', '.join(f'`{name}`' for name in of['equal'])}\n")
    for outcome, (title, column) in TITLES.items():
        if outcome != "equal" and of[outcome]:
            rows = [f"| `{name}` | `{_told(name, classes[name]['why'])}` |" for name in of[outcome]]
            table = [f"| class | {column} |", "|---|---|", *rows]
            parts.append("\n".join([f"## {title}: {len(rows)}", "", *table, ""]))
    return "\n".join(parts)


def _told(name: str, why: str) -> str:
    """In a cell of a table, as code."""
    return why.replace("`", "'").replace("|", "/").removeprefix(f"{name} cannot run by transformers' own code: ")


def in_a_process(name: str) -> dict[str, Any]:
    """What became of a class. Its process is a copy of one that has imported all and computed nothing: a copy of this
    one would wait for threads of torch that were not copied with it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTS])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, name))
    start = time.perf_counter()
    process.start()
    theirs.close()
    outcome: dict[str, Any] = {"outcome": "not built"}
    while True:  # once it is built, and once it is compared
        if not ours.poll(max(0.0, LIMIT - (time.perf_counter() - start))):
            outcome["why"] = f"took longer than {LIMIT} s"
            break
        try:
            outcome = ours.recv()
        except EOFError:
            process.join()
            outcome["why"] = f"its process ended with {process.exitcode}"
            break
        if outcome != BUILT:
            break
    process.kill()
    process.join()
    return outcome | {"seconds": round(time.perf_counter() - start, 1)}


def _send(pipe: Any, name: str) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
        pipe.send(try_class(name, lambda: pipe.send(BUILT)))


def try_class(name: str, when_built: Callable[[], object]) -> dict[str, Any]:
    """{"outcome": equal | refused | different | failed | not built, ...}."""
    from minivllm.errors import UserError
    from minivllm.models import read_spec

    with tempfile.TemporaryDirectory() as folder:
        try:
            config = tiny_config(name)
        except Exception as e:
            return {"outcome": "not built", "why": _line(e)}
        try:  # what is refused by its config alone is not made: some look for kernels in the network
            read_spec({**config.to_dict(), "architectures": [name]}, where=name, network="transformers")
        except UserError as e:
            return {"outcome": "refused", "why": _line(e).removeprefix(f"{name}: ")}
        try:
            oracle = build_tiny(name, config, Path(folder))
        except Exception as e:
            return {"outcome": "not built", "why": _line(e)}
        try:
            expected = [expected_of(oracle, prompt) for prompt in _prompts()]
        except Exception as e:
            return {"outcome": "not built", "why": f"transformers itself does not run it: {_line(e)}"}
        when_built()
        try:
            return compare(folder, expected)
        except UserError as e:
            return {
                "outcome": "refused",
                "why": _line(e).removeprefix(f"{folder}/config.json: ").removeprefix(f"{folder}: "),
            }
        except Exception as e:
            return {"outcome": "failed", "why": _line(e)}


def _line(error: Exception) -> str:
    said = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
    return said if type(error).__module__.startswith("minivllm") else f"{type(error).__name__}: {said}"


def build_tiny(name: str, config: Any, folder: Path) -> Any:
    """transformers' model in fp32, saved with a tokenizer; biases and norms random too."""
    import torch
    import transformers

    from minivllm.loading.dummy import write_tokenizer

    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval().float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("bias"):
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCABULARY)
    return model


def tiny_config(name: str) -> Any:
    import transformers

    kind = getattr(transformers, name).config_class
    usual = kind()
    known = {key: value for key, value in SIZES.items() if _can_be_set(usual, key)}
    if "qk_rope_head_dim" in known:  # MLA: what of a head is rotated is a head to the rotary embedding
        known["head_dim"] = known["qk_rope_head_dim"]
        known["num_key_value_heads"] = known["num_attention_heads"]
    return kind(**known | OWN.get(name, {}))


def _can_be_set(usual: Any, key: str) -> bool:
    if isinstance(getattr(type(usual), key, None), property):
        return False
    try:
        return hasattr(usual, key)
    except Exception:  # transformers': it is said of each layer alone
        return False


def _prompts() -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    return [torch.randint(16, VOCABULARY, (n,), generator=generator).tolist() for n in PROMPTS]


def expected_of(oracle: Any, prompt: list[int]) -> tuple[Any, list[int]]:
    """(log-probabilities behind each token of the prompt [n, vocab], greedy tokens), the whole anew for each."""
    import torch

    ids = list(prompt)
    with torch.inference_mode():
        of_prompt = oracle(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
        for _ in range(NUM_TOKENS):
            ids.append(int(oracle(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return of_prompt, ids[len(prompt) :]


def compare(folder: str, expected: list[tuple[Any, list[int]]]) -> dict[str, Any]:
    import torch

    from minivllm import LLM, SamplingParams

    asked = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=VOCABULARY)
    with LLM(folder, overrides=ENGINE) as llm:
        outputs = llm.generate(_prompts(), asked, use_tqdm=False)
        again = llm.generate(_prompts(), asked, use_tqdm=False)  # by prefixes that were found
    error, size, same = 0.0, 1.0, True
    for first, second, (of_prompt, tokens) in zip(outputs, again, expected, strict=True):
        told = [[of[i].logprob for i in range(VOCABULARY)] for of in first.prompt_logprobs[1:]]
        error = max(error, float((torch.tensor(told) - of_prompt[:-1]).abs().max()))
        size = max(size, float(of_prompt.abs().max()))
        same &= tokens == list(first.outputs[0].token_ids) == list(second.outputs[0].token_ids)
    outcome = "equal" if same and error <= NEAR * size else "different"
    why = {} if outcome == "equal" else {"why": f"greedy tokens {'equal' if same else 'differ'}"}
    return {"outcome": outcome, "error": float(f"{error:.2g}"), "largest": float(f"{size:.3g}"), **why}


if __name__ == "__main__":
    main()
