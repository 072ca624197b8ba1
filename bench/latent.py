"""How much faster than its reference is latent attention's kernel on a CPU, by requests and context?

Decodes of one layer (MLA, absorbed) over pages that a running engine leaves, both backends in turns, each call over
another layer's cache. Of each pair of calls the ratio of CPU time counts, so that a neighbour slows both sides.

    python -m bench latent --decode 1x200 1x4000 8x1000 32x1000 --shape deepseek-v2-lite
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from attention import block_tables, cases, make_batch
from common import emit, note, parser, spread

from minivllm.attention.base import AttentionSpec, kv_spec
from minivllm.features import LATENT_ATTENTION
from minivllm.kv_groups import Latent

# heads, of q and K: what does not turn, V, what is kept
SHAPES = {"deepseek-v2-lite": (16, 128, 128, Latent(512, 64)), "deepseek-v3": (128, 128, 128, Latent(512, 64))}
NUM_CACHES = 4  # that calls take in turns: together larger than the processor's caches


class Calls:
    """One backend; a call computes a layer and says how many seconds of CPU that took, its step prepared before."""

    def __init__(self, name: str, shape: str, batch, block_size: int, dtype: torch.dtype):
        heads, nope_size, value_size, latent = SHAPES[shape]
        head_size = nope_size + latent.rope_size
        self.layer = AttentionSpec(heads, heads, head_size, head_size**-0.5, latent=latent)
        spec, num_blocks = kv_spec([self.layer], block_size, dtype), int(batch.block_tables.max()) + 2
        self.backend = LATENT_ATTENTION.get(name)([self.layer], spec, num_blocks, torch.device("cpu"))
        self.caches = [torch.randn(self.backend.kv_shape(num_blocks), dtype=dtype) for _ in range(NUM_CACHES)]
        generator, count = torch.Generator().manual_seed(0), batch.num_tokens
        self.q = torch.randn(count, heads, head_size, generator=generator).to(dtype)
        self.new = torch.randn(count, latent.size, generator=generator).to(dtype)
        expand = torch.randn(heads, nope_size + value_size, latent.rank, generator=generator)
        self.expand, self.out = (expand / latent.rank**0.5).to(dtype), self.q.new_empty(count, heads, value_size)
        self.meta, self.turn = self.backend.prepare(batch), 0

    @torch.inference_mode()
    def __call__(self) -> float:
        kv, self.turn = self.caches[self.turn % NUM_CACHES], self.turn + 1
        begin = time.process_time()
        self.backend.forward(self.q, self.new, self.expand, kv, self.meta, self.layer, self.out)
        return time.process_time() - begin


def main() -> None:
    args = parser(__doc__.splitlines()[0], Path(__file__).stem)
    args.add_argument("--shape", default="deepseek-v2-lite", choices=SHAPES)
    args.add_argument("--dtype", default="float32", choices=["bfloat16", "float16", "float32"])
    args.add_argument("--decode", nargs="*", default=["1x200", "1x4000", "8x1000", "32x1000"], help="requests x length")
    args.add_argument("--block-size", type=int, default=16)
    args.add_argument("--rounds", type=int, default=40, help="pairs of calls of each case")
    args.add_argument("--threads", type=int, default=1, help="those of OpenMP that wait for each other count too")
    args = args.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for label, seq_lens, num_queries in cases(args.decode, True, False):
        tables = block_tables("served", len(seq_lens), -(-int(seq_lens.max()) // args.block_size))
        batch = make_batch(tables, seq_lens, num_queries, args.block_size)
        dtype = getattr(torch, args.dtype)
        ours, slow = (Calls(name, args.shape, batch, args.block_size, dtype) for name in ("cpu", "reference"))
        pairs = [(ours(), slow()) for _ in range(args.rounds + 1)][1:]
        ratios = spread([theirs / own for own, theirs in pairs])
        results.append({"case": label, "cpu_us": spread([1e6 * own for own, _ in pairs]), "ratio": ratios})
        note(f"{label:16} {results[-1]}")
    emit("latent", vars(args), results, args.out)


if __name__ == "__main__":
    main()
