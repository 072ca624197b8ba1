"""Parallel sampling and beam search on both of vLLM's designs: python examples/v0_and_v1.py [MODEL]

The only difference between the two runs is preset="v0" or "v1" (scheduler, KV cache, batch, overlap: all of them are
switches). One sees the same texts twice, with the seconds that each took: a scheduling decision may change timing,
never output. In float32, where a tie between two tokens cannot fall either way by rounding.
"""

import sys
import time

from minivllm import LLM, BeamSearchParams, SamplingParams

prompts = ["Once upon a time", "The reason why the sky is blue"]
ways = [SamplingParams(n=3, temperature=0.8, seed=1, max_tokens=24), BeamSearchParams(beam_width=3, max_tokens=24)]
texts = {}

for preset in ("v0", "v1"):
    with LLM(*sys.argv[1:], preset=preset, dtype="float32") as llm:
        begin = time.perf_counter()
        outputs = llm.generate(prompts, ways, use_tqdm=False)  # the first prompt is sampled, the second searched
        seconds = time.perf_counter() - begin
    texts[preset] = [[completion.text for completion in output.outputs] for output in outputs]
    print(f"{preset}: {seconds:.2f} s, {llm.stats.num_steps} steps")

for prompt, found in zip(prompts, texts["v1"], strict=True):
    print("\n  ".join([f"\n{prompt} ...", *map(repr, found)]))
print(f"\nthe same texts by both: {'yes' if texts['v0'] == texts['v1'] else 'no'}")
