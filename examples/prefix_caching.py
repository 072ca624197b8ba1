"""Watch the prefix cache in a server's metrics: python examples/prefix_caching.py [URL]

Start one first: `minivllm serve`. Three questions about one long text. One sees that the first finds nothing, that the
others find all of the text but its last block, and what that does to the wait for the first token. Run it twice: then
the first question finds the text as well.
"""

import re
import sys
import time

import httpx

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
text = "The tide comes in twice a day, and twice a day it leaves again. " * 20


def counter(name):
    return float(re.search(rf"^minivllm:{name}_total{{.*}} (.*)$", httpx.get(f"{url}/metrics").text, re.M)[1])


for question in ("How often does it come?", "How often does it leave?", "What is this about?"):
    before, begin = [counter(name) for name in ("prefix_cache_queries", "prefix_cache_hits")], time.perf_counter()
    body = {"prompt": text + question, "max_tokens": 1}
    httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
    ms = 1e3 * (time.perf_counter() - begin)
    asked, found = counter("prefix_cache_queries") - before[0], counter("prefix_cache_hits") - before[1]
    print(f"{question:25} {found:4.0f} of {asked:.0f} tokens were in the cache; first token after {ms:.0f} ms")
