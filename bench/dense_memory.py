"""How much memory does oneDNN keep for dense products, when steps come in every size?

It compiles a product for each shape, and a step of another size is another shape. A process multiplies with the four
matrices of a layer, packed as minivllm/layers/linear.py packs them, for one number of tokens after the other, in random
order, each number once; layers of equal shapes share what is compiled. Its memory is noted on the way. oneDNN's cache
holds 1,024 primitives, the least recently used one goes, and ONEDNN_PRIMITIVE_CACHE_CAPACITY sets another number:
`capacity` 1 shows what stays although the cache keeps nothing (generated kernels, which primitives of like shapes share
and which are never freed). `compile_ms` is the CPU time that the first product of a size takes longer than the next
one, for all four together.

    python -m bench dense_memory --out
    python -m bench dense_memory --dtype float32 --sizes 256
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil
from common import emit, note, parser

SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576))  # SmolLM2-135M's: in, out
EVERY = 64  # sizes


def child(dtype: str, sizes: int) -> dict[str, Any]:
    import torch

    from minivllm.layers.linear import Linear, PrepackedCPU

    torch.set_num_threads(1)
    kind = getattr(torch, dtype)
    layers = [Linear(n_in, {"all": n_out}, dtype=kind, method=PrepackedCPU()) for n_in, n_out in SHAPES]
    inputs = [torch.randn(sizes, n_in, dtype=kind) for n_in, _ in SHAPES]
    for layer in layers:
        torch.nn.init.normal_(layer.weight)
        layer.finish()

    def multiply(num_tokens: int) -> float:
        begin = time.process_time()
        for layer, x in zip(layers, inputs, strict=True):
            layer(x[:num_tokens])
        return 1e3 * (time.process_time() - begin)

    multiply(sizes)  # what a first product brings beside its own
    begin, order = psutil.Process().memory_info().rss, list(range(1, sizes))
    random.Random(0).shuffle(order)
    mib, compiling = {}, []
    for i, num_tokens in enumerate(order, start=1):
        first, again = multiply(num_tokens), multiply(num_tokens)
        compiling.append(first - again)
        if i % EVERY == 0 or i == len(order):
            mib[i] = round((psutil.Process().memory_info().rss - begin) / 2**20, 1)
    return {"mib_by_sizes": mib, "compile_ms": round(statistics.median(compiling), 2)}


def measure(dtype: str, sizes: int, capacity: int | None) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if "PRIMITIVE_CACHE_CAPACITY" not in name}
    if capacity is not None:
        env["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = str(capacity)
    command = [sys.executable, __file__, "--child", dtype, str(sizes)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> int:
    p = parser(__doc__.splitlines()[0], "dense_memory")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    p.add_argument("--sizes", type=int, default=512, help="numbers of tokens, from 1")
    p.add_argument("--capacities", type=int, nargs="*", default=[256, 1], help="beside oneDNN's own 1,024")
    args = p.parse_args()
    rows = []
    for capacity in (None, *args.capacities):
        rows.append({"capacity": capacity or 1024, **measure(args.dtype, args.sizes, capacity)})
        note(str(rows[-1]))
    params = {"dtype": args.dtype, "sizes": args.sizes, "shapes": SHAPES}
    emit("dense_memory", params, rows, args.out)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2], int(sys.argv[3]))))
    else:
        raise SystemExit(main())
