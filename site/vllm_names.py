"""Write down which fields vLLM's requests have: `python site/vllm_names.py FOLDER`, of vLLM's source distribution.

Its protocol cannot be imported without its engine, so it is read as syntax trees; site/vllm.json keeps the names.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

OUT = Path(__file__).parent / "vllm.json"
# vLLM's classes by the Struct of ours that stands for them.
CLASSES = {
    "ChatRequest": ("ChatCompletionRequest",),
    "CompletionRequest": ("CompletionRequest",),
    "StreamOptions": ("StreamOptions",),
    "StructuredOutputs": ("StructuredOutputsParams",),
    "ResponseFormat": ("ResponseFormat",),
    "JSONSchema": ("JsonSchemaResponseFormat",),
    "Tool": ("ChatCompletionToolsParam",),
    "Function": ("FunctionDefinition",),
    "ResponsesRequest": ("ResponsesRequest",),
    "MessagesRequest": ("AnthropicMessagesRequest",),
    "CountTokensRequest": ("AnthropicCountTokensRequest",),
    "CustomTool": ("AnthropicTool",),
    "EmbeddingRequest": ("EmbeddingCompletionRequest", "EmbeddingChatRequest"),
    "ScoreRequest": ("ScoreTextRequest", "ScoreDataRequest", "ScoreQueriesDocumentsRequest")
    + ("ScoreQueriesItemsRequest",),
    "RerankRequest": ("RerankRequest",),
    "Tokenize": ("TokenizeCompletionRequest", "TokenizeChatRequest"),
    "Detokenize": ("DetokenizeRequest",),
    "LoadAdapter": ("LoadLoRAAdapterRequest",),
    "UnloadAdapter": ("UnloadLoRAAdapterRequest",),
}
NOT_SENT = {"model_config", "field_names"}  # of the classes, and no fields


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    version = re.search(r"^Version: (.*)$", (folder / "PKG-INFO").read_text(), re.MULTILINE)[1]
    files = [*sorted((folder / "vllm" / "entrypoints").rglob("protocol.py")), folder / "vllm" / "sampling_params.py"]
    known = {node.name: node for path in files for node in classes(path)}
    fields = {
        ours: " ".join(sorted({name for kind in theirs for name in names(kind, known)}))
        for ours, theirs in CLASSES.items()
    }
    OUT.write_text(json.dumps({"version": version, "fields": fields}, indent=1) + "\n")


def classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))


def names(kind: str, known: dict[str, ast.ClassDef]) -> Iterator[str]:
    """Of a class and those that it comes from, as they are called on the wire."""
    node = known[kind]
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in known:
            yield from names(base.id, known)
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and not line.target.id.startswith("_") and line.target.id not in NOT_SENT:
            yield alias(line) or line.target.id


def alias(line: ast.AnnAssign) -> str | None:
    keywords = [node for node in ast.walk(line) if isinstance(node, ast.keyword) and node.arg == "alias"]
    return keywords[0].value.value if keywords else None


if __name__ == "__main__":
    main()
