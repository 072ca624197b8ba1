"""Chat with a running server through the openai client: python examples/streaming_chat.py [URL]

Start one first: `minivllm serve`. One sees the answer grow word by word, then what the client waited for: the time to
the first token (the prompt is computed), and the time between two tokens (a step of the engine each).
"""

import sys
import time

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id

begin, times = time.perf_counter(), []
question = [{"role": "user", "content": "Name the three primary colors."}]
for chunk in client.chat.completions.create(model=model, messages=question, stream=True, max_tokens=64, temperature=0):
    if text := chunk.choices[0].delta.content:
        times.append(time.perf_counter())
        print(text, end="", flush=True)

between = (times[-1] - times[0]) / max(1, len(times) - 1)
print(f"\n\n{model}: first token after {1e3 * (times[0] - begin):.0f} ms, then one every {1e3 * between:.0f} ms")
