"""Tool calling: which functions a model may call, how it writes a call, and how that becomes OpenAI's `tool_calls`.

ask.py     what a request wants, and the JSON schema that a forced call must follow
reader.py  the parts of an incremental parser; json_reader.py is its JSON
parsers.py what a parser is
forms.py   how a format writes calls, for the grammar that holds one beside an answer that is held, too
formats/   the parsers, which are the options of --tool-call-parser
answer.py  a parser's events as messages and deltas
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.registry import Registry
from minivllm.serve.marks import Choice, configured, found

if TYPE_CHECKING:
    from minivllm.engine.tokenizer import TextTokenizer
    from minivllm.serve.tools.parsers import ToolParser

# A server's option, not an engine's: it has no place in the feature table, whose options are all about the engine.
# The order is that in which a template's marks are looked for (marks.py).
# A name with the target of one before it is an alias, where vLLM has a parser each.
TOOL_PARSERS: Registry[ToolParser] = Registry(
    "--tool-call-parser",
    {
        "mistral": "minivllm.serve.tools.formats.mistral:MistralParser",
        "qwen3_coder": "minivllm.serve.tools.formats.qwen3_coder:Qwen3CoderParser",
        "qwen3_xml": "minivllm.serve.tools.formats.qwen3_coder:Qwen3CoderParser",
        "glm45": "minivllm.serve.tools.formats.glm45:Glm45Parser",
        "glm47": "minivllm.serve.tools.formats.glm45:Glm45Parser",
        "hermes": "minivllm.serve.tools.formats.hermes:HermesParser",
        "granite4": "minivllm.serve.tools.formats.hermes:HermesParser",
        "deepseek_v3": "minivllm.serve.tools.formats.deepseek_v3:DeepseekV3Parser",
        "deepseek_v31": "minivllm.serve.tools.formats.deepseek_v3:DeepseekV3Parser",
        "deepseek_v32": "minivllm.serve.tools.formats.deepseek_v32:DeepseekV32Parser",
        "deepseek_v4": "minivllm.serve.tools.formats.deepseek_v32:DeepseekV32Parser",
        "kimi_k2": "minivllm.serve.tools.formats.kimi_k2:KimiK2Parser",
        "openai": "minivllm.serve.tools.formats.openai:OpenaiParser",
        "cohere_command": "minivllm.serve.tools.formats.cohere_command:CohereCommandParser",
        "cohere_command3": "minivllm.serve.tools.formats.cohere_command:CohereCommandParser",
        "cohere_command4": "minivllm.serve.tools.formats.cohere_command:CohereCommandParser",
        "phi4_mini_json": "minivllm.serve.tools.formats.phi4_mini_json:Phi4MiniJsonParser",
        "granite": "minivllm.serve.tools.formats.granite:GraniteParser",
        "granite-20b-fc": "minivllm.serve.tools.formats.granite_20b_fc:Granite20bParser",
        "internlm": "minivllm.serve.tools.formats.internlm:InternlmParser",
        "pythonic": "minivllm.serve.tools.formats.pythonic:PythonicParser",
        "llama4_pythonic": "minivllm.serve.tools.formats.pythonic:PythonicParser",
        "llama3_json": "minivllm.serve.tools.formats.llama3_json:Llama3JsonParser",
        "llama4_json": "minivllm.serve.tools.formats.llama3_json:Llama3JsonParser",
    },
)


def choose(option: str, tokenizer: TextTokenizer) -> Choice:
    """The parser named, or for "auto" the one for the calls that the model's chat template writes. None: a template
    with tools in a format that no parser reads. Raises ConfigError for a name that is none."""
    return configured(TOOL_PARSERS, option) if option != "auto" else find(tokenizer.tool_template)


def find(template: str | None) -> Choice:
    """template: the source of the chat template, if it knows of tools."""
    if template is None:
        why = "the chat template knows no tools; they are described in the system message"
        return configured(TOOL_PARSERS, "hermes")._replace(reason=why)
    return found(TOOL_PARSERS, template, "the chat template writes tool calls in a format of its own")
