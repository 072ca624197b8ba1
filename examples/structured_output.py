"""Make a model answer in JSON of a schema: python examples/structured_output.py [MODEL]

One sees, for each review, an object that json.loads reads and that has the schema's keys and values. Whether the
judgement is wise is the model's affair. That it can be parsed is not: what would break the schema is never drawn.
"""

import json
import sys

from minivllm import LLM, SamplingParams, StructuredParams

schema = {
    "type": "object",
    "properties": {"mood": {"enum": ["happy", "angry", "neutral"]}, "stars": {"enum": [1, 2, 3, 4, 5]}},
    "required": ["mood", "stars"],
    "additionalProperties": False,
}
reviews = ["Best bread in town!", "Cold soup, rude waiter.", "It was a restaurant."]
chats = [[{"role": "user", "content": f"Judge this review, as JSON: {review}"}] for review in reviews]
params = SamplingParams(
    temperature=0, max_tokens=200, structured=StructuredParams(json=schema, disable_any_whitespace=True)
)

with LLM(*sys.argv[1:]) as llm:
    for review, output in zip(reviews, llm.chat(chats, params, use_tqdm=False), strict=True):
        print(f"{review:25} {json.loads(output.outputs[0].text)}")
