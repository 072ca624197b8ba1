"""Which specifications need no trial (trial.py): JSON mode, a few choices, a small schema of plain keywords.

They are most of what is asked for, and a child would cost the first of them seconds and each some milliseconds. What
they cost a library is bounded by their length: 2,048 characters of the worst that was found within these keywords took
XGrammar 0.9 s and llguidance 0.1 s with 49,152 tokens, in a thread, without the interpreter's lock.
"""

from __future__ import annotations

import json
from typing import Any

from minivllm.structured import schema as schemas
from minivllm.structured.params import StructuredParams

MAX_CHARS = 2048
MAX_COUNT = 1000
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems"}
_KEYWORDS = {"type", "properties", "required", "items", "additionalProperties", "enum", "const", "anyOf", "$ref"}
_KEYWORDS |= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"} | _COUNTS


def is_ordinary(params: StructuredParams) -> bool:
    """Whatever is wrong with it is for others to say."""
    if params.kind == "json":
        return len(params.json) <= MAX_CHARS and _is_plain(params.json)
    return params.kind == "json_object" or params.kind == "choice" and sum(map(len, params.choice)) <= MAX_CHARS


def _is_plain(text: str) -> bool:
    try:
        places = list(schemas.subschemas(json.loads(text)))
    except (ValueError, RecursionError):
        return False
    return all(_is_plain_itself(place.schema) for place in places if isinstance(place.schema, dict))


def _is_plain_itself(schema: dict[str, Any]) -> bool:
    counts = [schema[key] for key in _COUNTS & schema.keys()]
    is_small = all(isinstance(count, int) and count <= MAX_COUNT for count in counts)
    keywords = schemas.assertions(schema)
    is_simple = len(keywords) == 1 or not keywords & {"anyOf", "$ref"}  # what stands beside them may multiply
    return is_small and is_simple and keywords <= _KEYWORDS
