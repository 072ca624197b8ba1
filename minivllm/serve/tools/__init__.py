"""Tool calling: which functions a model may call, how it writes a call, and how that becomes OpenAI's `tool_calls`.

ask.py     what a request wants, and the JSON schema that a forced call must follow
reader.py  the parts of an incremental parser; json_reader.py is its JSON
parsers.py the formats, which are the options of --tool-call-parser
answer.py  a parser's events as messages and deltas
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from minivllm.registry import Registry

if TYPE_CHECKING:
    from minivllm.engine.tokenizer import TextTokenizer
    from minivllm.serve.tools.parsers import ToolParser

# A server's option, not an engine's: it has no place in the feature table, whose options are all about the engine.
TOOL_PARSERS: Registry[ToolParser] = Registry(
    "--tool-call-parser",
    {
        "hermes": "minivllm.serve.tools.parsers:HermesParser",
        "llama3_json": "minivllm.serve.tools.parsers:Llama3JsonParser",
        "mistral": "minivllm.serve.tools.parsers:MistralParser",
    },
)


class Choice(NamedTuple):
    parser: type[ToolParser] | None
    name: str
    reason: str


def choose(option: str, tokenizer: TextTokenizer) -> Choice:
    """The parser named, or for "auto" the one for the calls that the model's chat template writes. None: a template
    with tools in a format that no parser reads. Raises ConfigError for a name that is none."""
    if option != "auto":
        return Choice(TOOL_PARSERS.get(option), option, "as configured")
    name, reason = find(tokenizer.tool_template)
    return Choice(TOOL_PARSERS.get(name) if name else None, name or "none", reason)


def find(template: str | None) -> tuple[str | None, str]:
    """template: the source of the chat template, if it knows of tools."""
    if template is None:
        return "hermes", "the chat template knows no tools; they are described in the system message"
    if "[TOOL_CALLS]" in template:
        return "mistral", "the chat template writes [TOOL_CALLS]"
    if "<tool_call>" in template and "<function=" not in template:  # the latter: Qwen 3 Coder's XML
        return "hermes", "the chat template writes <tool_call>"
    if "<|python_tag|>" in template or ('"parameters"' in template and "ipython" in template):
        return "llama3_json", "the chat template asks for a call as a JSON object"
    return None, "the chat template writes tool calls in a format of its own"
