"""What does LoRA cost a batch in which every request uses one of several adapters?

Against the same batch without LoRA. Two engines, one without LoRA and one with it on, take the same prompts in
alternating runs. The second one also runs without naming an adapter, which shows what merely having LoRA on costs. The
adapters are random, of all seven linear layers: their size and not their content decides the time.

    python -m bench lora                        # 32 requests, 8 adapters, rank 8 and 16
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path

import torch
from common import emit, note, parser, spread
from safetensors.torch import save_file

from minivllm import LLM, SamplingParams

MODULES = {  # module -> (which output size, which input size) of the model's configuration
    "self_attn.q_proj": ("q", "hidden"),
    "self_attn.k_proj": ("kv", "hidden"),
    "self_attn.v_proj": ("kv", "hidden"),
    "self_attn.o_proj": ("hidden", "q"),
    "mlp.gate_proj": ("mlp", "hidden"),
    "mlp.up_proj": ("mlp", "hidden"),
    "mlp.down_proj": ("hidden", "mlp"),
}


def write_adapter(folder: Path, spec, rank: int, seed: int) -> str:
    """spec: the model's ModelSpec."""
    torch.manual_seed(seed)
    size = {"hidden": spec.hidden_size, "mlp": spec.intermediate_size}
    size |= {"q": spec.num_heads * spec.head_size, "kv": spec.num_kv_heads * spec.head_size}
    tensors = {}
    for layer in range(spec.num_layers):
        for module, (n_out, n_in) in MODULES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, size[n_in]) / size[n_in] ** 0.5
            tensors[f"{name}.lora_B.weight"] = 0.05 * torch.randn(size[n_out], rank)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [name.rpartition(".")[2] for name in MODULES]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def prompts(args) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1000, 40_000) for _ in range(args.input_len)] for _ in range(args.num_reqs)]


def tokens_per_second(llm: LLM, args, adapters: list[str | None]) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts(args), params, lora_request=adapters, use_tqdm=False)
    return args.num_reqs * args.output_len / (time.perf_counter() - start)


def compare(bare: LLM, args, rank: int, root: Path) -> dict:
    spec = bare._core.executor.worker.runner.model.spec
    folders = {f"r{rank}-{i}": write_adapter(root / f"r{rank}-{i}", spec, rank, i) for i in range(args.num_adapters)}
    options = {"lora.enabled": True, "lora.max_loras": args.num_adapters, "lora.adapters": folders}
    names = list(folders)
    rng = random.Random(1)
    mixed = [names[i % len(names)] for i in range(args.num_reqs)]
    rng.shuffle(mixed)  # tokens of one adapter are no neighbours
    nobody = [None] * args.num_reqs
    with engine(args, options) as lora:
        runs = {"off": (bare, nobody), "on, unused": (lora, nobody), "on": (lora, mixed)}
        speeds: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(args.rounds + 1):  # the first round warms up
            for name, (llm, adapters) in runs.items():
                speed = tokens_per_second(llm, args, adapters)
                speeds[name] += [speed] * (i > 0)
    slower = {
        name: spread([100 * (1 - b / a) for a, b in zip(speeds["off"], speeds[name], strict=True)], 1)
        for name in ("on, unused", "on")
    }
    best = {name: round(100 * (1 - max(speeds[name]) / max(speeds["off"])), 1) for name in ("on, unused", "on")}
    result = {"rank": rank, "tokens_per_second": {name: spread(s, 1) for name, s in speeds.items()}}
    result |= {"percent_slower": slower, "percent_slower_best_of": best}
    note(f"rank {rank}: {result}")
    return result


def engine(args, options: dict) -> LLM:
    num_blocks = args.num_reqs * -(-(args.input_len + args.output_len) // 16) + 8
    base = {"model.path": args.model, "model.dtype": args.dtype, "executor.num_threads": args.threads}
    base |= {"kv.num_blocks": num_blocks, "kv.prefix": "none"}
    return LLM(overrides={**base, **options})


def main() -> None:
    args = parser(__doc__, "lora")
    args.add_argument("--model", default="smollm2-135m")
    args.add_argument("--dtype", default="auto")
    args.add_argument("--threads", type=int, default=None, help="of torch; None: all cores")
    args.add_argument("--num-reqs", type=int, default=32)
    args.add_argument("--num-adapters", type=int, default=8)
    args.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    args.add_argument("--input-len", type=int, default=32)
    args.add_argument("--output-len", type=int, default=96)
    args.add_argument("--rounds", type=int, default=5)
    args = args.parse_args()
    with tempfile.TemporaryDirectory() as folder, engine(args, {}) as bare:
        results = [compare(bare, args, rank, Path(folder)) for rank in args.ranks]
        info = {"dtype": bare.info["dtype"], "attention": bare.info["attention"]}
    emit("lora", {**vars(args), **info}, results, args.out)


if __name__ == "__main__":
    main()
