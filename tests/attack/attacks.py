"""What a client with a valid key can send to stop the others, a row for each; `of` names the finding of the review of
this server, or the CVE of another one, that a row is after. A row's requests are made before anything is timed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
BLANK = 223  # the token of a dummy's blank
HELLO = [{"role": "user", "content": "Hello"}]

Requests = list[tuple[str, bytes]]  # path, body


class Attack(NamedTuple):
    name: str
    of: str
    requests: Callable[[], Requests]
    leaves: float | None = None  # seconds after which its clients go; None: they stay for their answers
    served: bool = False  # its requests are as dear as they look, and are answered in their turn
    how: Literal["post", "get", "cut"] = "post"  # cut: without the last bytes of its body


def sent(path: str, *bodies: Any) -> Requests:
    return [(path, json.dumps(body).encode()) for body in bodies]


def asked(**body: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 8, "temperature": 0, **body}


# ------------------------------------------------------------------------------------------------------------ grammars


def doubling_schema(levels: int = 7, width: int = 12) -> dict[str, Any]:
    """Each level has a oneOf of two of the next one's, behind `width` required properties: width ** levels pairs."""
    defs: dict[str, Any] = {f"a{levels}": {"type": "integer"}, f"b{levels}": {"type": "integer"}}
    for i in range(levels):
        choice = {"oneOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"$ref": f"#/$defs/b{i + 1}"}]}
        for kind in "ab":
            properties = {f"{kind if j == width - 1 else 'p'}{j}": choice for j in range(width)}
            defs[f"{kind}{i}"] = {"type": "object", "properties": properties, "required": list(properties)}
    return {"$defs": defs, "oneOf": [{"$ref": "#/$defs/a0"}, {"$ref": "#/$defs/b0"}]}


def chained_references(num: int = 3000) -> dict[str, Any]:
    defs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(num)}
    return {"$defs": {**defs, f"d{num}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def schemas() -> Requests:
    many = [{"const": i} for i in range(7500)]
    found = [doubling_schema(), doubling_schema(width=11), chained_references(), {"oneOf": many}]
    return sent(COMPLETIONS, *(asked(guided_json=schema) for schema in found))


def patterns() -> Requests:
    bad = [
        "(?:){1000000000}",
        "a{" + "9" * 5000 + "}",
        "(((a{1,999}){1,999}){1,999}){1,999}",
        "(" * 5000 + "a" + ")" * 5000,
    ]
    grammars = ["root ::= " + "(" * 4 + '"a"' + "{1,1000})" * 4, 'root ::= root "a" | "b"', 'root ::= "a"{1,100000000}']
    sized = {"type": "string", "maxLength": 10**400}
    return (
        sent(COMPLETIONS, *(asked(guided_regex=pattern) for pattern in bad))
        + sent(COMPLETIONS, *(asked(guided_grammar=text) for text in grammars))
        + [(COMPLETIONS, json.dumps(asked(guided_json=sized)).replace(str(10**400), "1e400").encode())]
    )


def masks() -> Requests:
    stars = "((a*)*)*" * 100
    return sent(COMPLETIONS, *(asked(guided_regex=stars, min_tokens=60, max_tokens=61, n=n) for n in (1, 16)))


# --------------------------------------------------------------------------------------------------------------- lists


def same_ids() -> Requests:
    ids = [65] * 600_000
    return sent(COMPLETIONS, asked(allowed_token_ids=ids, n=128), asked(stop_token_ids=ids, n=128)) + sent(
        COMPLETIONS, asked(prompt=["x"] * 16, allowed_token_ids=ids)
    )


def bad_words() -> Requests:
    words = [f"word{i}" for i in range(1000)]
    return sent(COMPLETIONS, asked(prompt=["x"] * 300, bad_words=words), asked(prompt=["x"] * 300, stop=words))


def biases() -> Requests:
    return sent(COMPLETIONS, asked(n=128, logit_bias={str(i % 500): 1.0 for i in range(100_000)}))


# ------------------------------------------------------------------------------------------------------------- fan-out


def fan_out() -> Requests:
    return sent(COMPLETIONS, *[asked(prompt=["x"] * 16, n=128, max_tokens=200, ignore_eos=True)] * 2)


def flood() -> Requests:
    return sent(COMPLETIONS, *[asked(max_tokens=32, ignore_eos=True)] * 200)


def echoes() -> Requests:
    ids = [[65 + i % 20] * 1500 for i in range(64)]
    return sent(COMPLETIONS, asked(prompt=ids, n=8, echo=True, logprobs=20, max_tokens=1))


# -------------------------------------------------------------------------------------------------------- long bodies


def turns(num: int, size: int) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": "word " * (size // 5)} for i in range(num)]


def conversations() -> Requests:
    long = {"max_tokens": 8, "messages": turns(15_999, 800)}
    many = {"max_tokens": 8, "messages": turns(59_999, 20)}
    return sent(MESSAGES, long, many) + sent(CHAT, long, many)


def prompts() -> Requests:
    return sent(COMPLETIONS, asked(prompt=["word " * 1600] * 2000), asked(prompt="word " * 2_500_000))


def tokens() -> Requests:
    return sent("/detokenize", {"tokens": [65] * 3_000_000}) + sent("/tokenize", {"prompt": "word " * 2_000_000})


def nested() -> Requests:
    deep = b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    wide = json.dumps(asked(metadata={f"key{i}": i for i in range(200_000)})).encode()
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}} for i in range(20_000)
    ]
    return [(COMPLETIONS, deep), (COMPLETIONS, wide)] + sent(CHAT, {"messages": HELLO, "tools": tools, "max_tokens": 8})


# ------------------------------------------------------------------------------------------------------------- leaving


def salts() -> Requests:
    bodies = [{**asked(max_tokens=1), "prompt": [[1]] * 512, "cache_salt": "s" * size} for size in (4_000, 4_000_000)]
    return sent(COMPLETIONS, *bodies)


def texts_for_each_prompt() -> Requests:
    schema = {"type": "object", "description": "x" * 120_000}
    return sent(COMPLETIONS, {**asked(max_tokens=1), "prompt": [[1]] * 1024, "guided_json": schema})


def documents() -> Requests:
    return [("/openapi.json", b"")] * 64


def blanks() -> Requests:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asks = {"messages": HELLO, "tools": [tool], "allowed_token_ids": [BLANK], "max_tokens": 900, "ignore_eos": True}
    return sent(CHAT, *[asks] * 8)


def unfinished() -> Requests:
    return [(COMPLETIONS, json.dumps(asked(prompt="x" * 4_000_000)).encode())] * 64


def kept() -> Requests:
    most = {f"key{i:02}": "v" * 512 for i in range(16)}
    return sent("/v1/responses", *[{"input": "Hello", "max_output_tokens": 1, "metadata": most}] * 200)


def slow_schemas() -> Requests:
    """A dozen, each of 200 patterns of its own."""
    return sent(COMPLETIONS, *(asked(guided_json=of_patterns(i)) for i in range(12)))


def of_patterns(number: int) -> dict[str, Any]:
    texts = {
        f"p{i}": {"type": "string", "pattern": f"^([a-f]{{1,40}}|x{number}_{i}[g-z]{{1,40}}){{1,20}}$"}
        for i in range(200)
    }
    return {"type": "object", "properties": texts, "required": list(texts)}


def streams() -> Requests:
    return sent(COMPLETIONS, *[asked(max_tokens=900, ignore_eos=True, stream=True)] * 100)


ATTACKS = (
    Attack("schemas whose analysis is exponential", "H1", schemas, leaves=1.0),
    Attack("patterns and grammars beyond all bounds", "H1, low", patterns),
    Attack("a mask that grows with the text", "H2", masks),
    Attack("millions of times the same id", "H3", same_ids),
    Attack("words and stops, a thousand for each prompt", "H5", bad_words),
    Attack("a bias for a hundred thousand ids", "H3", biases),
    Attack("thousands of sequences in a request", "H4; vLLM's CVE-2026-34756 and 73559", fan_out, served=True),
    Attack("hundreds of requests of one key", "H4", flood, served=True),
    Attack("log-probabilities of every position", "H6", echoes),
    Attack("conversations of thousands of turns", "H5", conversations),
    Attack("prompts far too long, and many", "H5", prompts),
    Attack("millions of ids to be made text", "H5; vLLM's CVE-2026-71486", tokens),
    Attack("JSON that is deep or wide", "fuzzing", nested),
    Attack("a salt of megabytes for hundreds of prompts", "S3", salts),
    Attack("a schema of a hundred kilobytes for a thousand prompts", "S3", texts_for_each_prompt),
    Attack("the document of all endpoints, again and again", "S1", documents, served=True, how="get"),
    Attack("answers of nothing but blanks, where calls may be", "S2", blanks, served=True),
    Attack("bodies that are never finished", "S5", unfinished, leaves=4.0, served=True, how="cut"),
    Attack("hundreds of responses to be kept", "S8", kept, served=True),
    Attack("a dozen schemas of slow patterns", "S10", slow_schemas),
    Attack("streams that are left", "as today", streams, leaves=0.3, served=True),
)


def named(names: Iterable[str]) -> list[Attack]:
    """Those whose names or findings contain one of these; all, if none is given."""
    wanted = list(names)
    return [a for a in ATTACKS if not wanted or any(name in f"{a.name} ({a.of})" for name in wanted)]
