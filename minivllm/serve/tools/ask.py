"""What a request wants of tools: `tools`, `tool_choice` and the messages of earlier calls, checked; and the JSON schema
that a forced call must follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from minivllm.errors import BadRequest
from minivllm.registry import did_you_mean
from minivllm.serve.protocol import AllowedTools, ChatRequest, Function, Message, NamedTool, Tool

Mode = Literal["none", "auto", "required", "named"]

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
DATA = ("const", "enum", "default", "examples")  # keywords of JSON Schema whose values are no schemas
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


@dataclass(frozen=True, slots=True)
class ToolUse:
    mode: Mode = "none"
    functions: tuple[Function, ...] = ()  # that may be called; the model is told of no others
    parallel: bool = True
    field: str = "tools"  # of the request; where a forced call's schema comes from

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Of the parameters, by the function's name."""
        return {function.name: parameters(function) for function in self.functions}

    def for_template(self) -> list[dict[str, Any]] | None:
        return [{"type": "function", "function": described(function)} for function in self.functions] or None


def asked(body: ChatRequest) -> ToolUse:
    """Raises BadRequest, naming the field."""
    check_history(body.messages)
    choice, tools = body.tool_choice, body.tools or []
    if not tools:
        if choice not in (None, "none"):
            raise BadRequest("tool_choice needs tools: there is nothing to choose from", "tool_choice")
        return ToolUse()
    names: set[str] = set()
    functions = tuple(checked(tool, f"tools[{i}]", names) for i, tool in enumerate(tools))
    parallel = body.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        (function,) = pick(functions, [choice.function.name], "tool_choice.function.name")
        return ToolUse("named", (function,), parallel, f"tools[{functions.index(function)}].function.parameters")
    if isinstance(choice, AllowedTools):
        allowed = [tool.function.name for tool in choice.allowed_tools.tools]
        if not allowed:
            raise BadRequest("tool_choice.allowed_tools.tools is empty", "tool_choice.allowed_tools.tools")
        picked = pick(functions, allowed, "tool_choice.allowed_tools.tools")
        return ToolUse(choice.allowed_tools.mode, picked, parallel)
    return ToolUse() if choice == "none" else ToolUse(choice or "auto", functions, parallel)


def checked(tool: Tool, path: str, before: set[str]) -> Function:
    """before: the names of those before it, to which its own is added."""
    function, where = tool.function, f"{path}.function"
    if function.name in before:
        raise BadRequest(f'{where}.name: there are two tools "{function.name}"', f"{where}.name")
    before.add(function.name)
    if function.parameters is not None and function.parameters.get("type", "object") != "object":
        what = 'must be the JSON schema of an object ("type": "object")'
        raise BadRequest(f"{where}.parameters {what}, got type {function.parameters['type']!r}", f"{where}.parameters")
    return function


def pick(functions: Sequence[Function], names: Sequence[str], param: str) -> tuple[Function, ...]:
    known = {function.name: function for function in functions}
    if unknown := [name for name in names if name not in known]:
        hint = did_you_mean(unknown[0], list(known))
        raise BadRequest(f'{param}: tools has no function "{unknown[0]}".{hint} It has: {", ".join(known)}', param)
    wanted = set(names)
    return tuple(function for function in functions if function.name in wanted)


def check_history(messages: Sequence[Message]) -> None:
    """Each result of a tool answers an earlier call, and only the roles that can have calls and results do."""
    called: set[str] = set()
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        if message.role == "function":
            raise BadRequest(f'{path}.role "function" is OpenAI\'s older form: use "tool"', f"{path}.role")
        if message.tool_calls and message.role != "assistant":
            raise BadRequest(f"{path}.tool_calls: only the assistant calls tools", f"{path}.tool_calls")
        if message.tool_call_id is not None and message.role != "tool":
            raise BadRequest(f'{path}.tool_call_id: only a message of role "tool" has one', f"{path}.tool_call_id")
        if message.role == "tool" and message.tool_call_id not in called:
            why = "is missing" if message.tool_call_id is None else f'"{message.tool_call_id}" is no earlier call\'s id'
            raise BadRequest(f"{path}.tool_call_id {why}", f"{path}.tool_call_id")
        called |= {call.id for call in message.tool_calls or ()}


def described(function: Function) -> dict[str, Any]:
    """As chat templates want it: what was not given is left out."""
    given = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {key: value for key, value in given.items() if value is not None}


def enforced(use: ToolUse) -> dict[str, Any] | None:
    """The JSON schema of the whole answer: a named function's arguments, or for "required" an array of one call or
    more, as vLLM has it. None: the model is free."""
    if use.mode == "named":
        return parameters(use.functions[0])
    if use.mode != "required":
        return None
    return calls_schema(use.schemas, use.parallel)


def calls_schema(
    schemas: Mapping[str, Any], parallel: bool, first: Mapping[str, Any] | None = None, **names: str
) -> dict[str, Any]:
    """Of an array of calls. schemas: of the functions' arguments. names: what the format calls the members `name` and
    `parameters`. first: members that come before them."""
    items, definitions = call_schema(schemas, first or {}, **names)
    bounds = {"minItems": 1} if parallel else {"minItems": 1, "maxItems": 1}
    return {"type": "array", **bounds, "items": items, "$defs": definitions}


def call_schema(
    schemas: Mapping[str, Any], first: Mapping[str, Any], name: str = "name", parameters: str = "parameters"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of one call, and the definitions that it refers to."""
    # A function's parameters become a definition of their own, no document ($id), and their references point into it.
    places = {
        called: called if called.isascii() and called.isidentifier() else f"function.{i}"
        for i, called in enumerate(schemas)
    }
    inner = {called: moved(schema, f"#/$defs/{places[called]}") for called, schema in schemas.items()}
    definitions = {places[called]: {k: v for k, v in each.items() if k != "$id"} for called, each in inner.items()}
    calls = [
        {
            "type": "object",
            "properties": {**first, name: {"const": called}, parameters: {"$ref": f"#/$defs/{place}"}},
            "required": [*first, name, parameters],
            "additionalProperties": False,
        }
        for called, place in places.items()
    ]
    return {"anyOf": calls}, definitions


def parameters(function: Function) -> dict[str, Any]:
    if function.parameters is None:
        return NO_PARAMETERS
    return {"type": "object", **function.parameters}


def moved(schema: Any, place: str) -> Any:
    """The schema with the references to itself ("#", "#/...") turned to where it now stands."""
    if isinstance(schema, list):
        return [moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    new = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            new[key] = place + value[1:]
        elif key in NAMED_SCHEMAS and isinstance(value, dict):
            new[key] = {name: moved(inner, place) for name, inner in value.items()}
        else:
            new[key] = value if key in DATA else moved(value, place)
    return new
