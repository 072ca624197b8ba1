"""Complete prompts without a server: python examples/offline_generate.py [MODEL]

One sees three continuations from one call, and that the three ran together: the engine took some twenty steps, not
sixty. Greedy, so the same texts every time; temperature=0.8 in SamplingParams would draw others.
"""

import sys

from minivllm import LLM, SamplingParams

prompts = ["The sea is", "The capital of Japan is", "To make bread one needs"]

with LLM(*sys.argv[1:]) as llm:  # the default model, unless one is named
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{num_tokens} tokens in {llm.stats.num_steps} steps of the engine")
