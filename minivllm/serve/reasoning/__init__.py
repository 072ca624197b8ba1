"""Reasoning models: what a model thinks before it answers, told from the answer.

reader.py  the parts of an incremental parser
parsers.py the formats, which are the options of --reasoning-parser
answer.py  a parser's events as messages and deltas, and how many tokens were thinking
ask.py     what a request wants of the thinking: how much of it, and where a grammar begins
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.registry import Registry
from minivllm.serve.marks import Choice, configured, found

if TYPE_CHECKING:
    from minivllm.engine.tokenizer import TextTokenizer
    from minivllm.serve.reasoning.reader import ReasoningReader

# A server's option, as --tool-call-parser is, and its order means the same. The names are vLLM's.
REASONING_PARSERS: Registry[ReasoningReader] = Registry(
    "--reasoning-parser",
    {
        "openai_gptoss": "minivllm.serve.reasoning.parsers:HarmonyReader",
        "mistral": "minivllm.serve.reasoning.parsers:MistralReader",
        "granite": "minivllm.serve.reasoning.parsers:GraniteReader",
        "kimi_k2": "minivllm.serve.reasoning.parsers:KimiK2Reader",
        "deepseek_r1": "minivllm.serve.reasoning.parsers:DeepSeekR1Reader",
        "qwen3": "minivllm.serve.reasoning.parsers:Qwen3Reader",
    },
)


def choose(option: str, tokenizer: TextTokenizer) -> Choice:
    """The parser named, or for "auto" the one for the thinking that the model's chat template writes. Raises
    ConfigError for a name that is none."""
    if option == "none":
        return Choice(None, "none", "as configured")
    return configured(REASONING_PARSERS, option) if option != "auto" else find(tokenizer.chat_template)


def find(template: str | None) -> Choice:
    """template: the source of the model's chat template, if it has one."""
    return found(REASONING_PARSERS, template or "", "the chat template knows of no thinking")
