"""Guess tokens ahead by looking them up in the prompt: python examples/speculative_decoding.py [MODEL]

The model is asked to copy, which is where n-gram lookup guesses well. One sees the same text with and without, in far
fewer steps of the engine: each step checks up to six guessed tokens at once and keeps those that the model agrees with.
"""

import sys
import time

from minivllm import LLM, SamplingParams

poem = "Twinkle, twinkle, little star, how I wonder what you are! Up above the world so high, like a diamond there. "
params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
texts = []

for options in ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 6}}):
    with LLM(*sys.argv[1:], dtype="float32", **options) as llm:
        begin = time.perf_counter()
        (output,) = llm.generate(poem * 3, params, use_tqdm=False)
        seconds, stats = time.perf_counter() - begin, llm.stats
    texts.append(output.outputs[0].text)
    guesses = f"{stats.num_accepted} of {stats.num_drafted} guesses right"
    print(f"{'n-gram' if options else 'none':7} {seconds:.2f} s, {stats.num_steps} steps, {guesses}")

print(f"\n{texts[0]!r}\nthe same text by both: {'yes' if texts[0] == texts[1] else 'no'}")
