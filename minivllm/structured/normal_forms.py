"""What several schemas say of a value of one type, as one schema: bounds that both meet, names with all that holds for
each. The schemas of properties and items are nodes, sets of schemas that normal.py reads in turn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, floor, gcd, lcm
from typing import Any, Protocol

from minivllm.structured import schema as schemas
from minivllm.structured.instances import Instances, exactly
from minivllm.structured.negation import ABSENT, ADDED, ONLY
from minivllm.structured.schema import Schema, SchemaError

OF_TYPE = {
    "null": (),
    "boolean": (),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains")
    + ("additionalItems", "unevaluatedItems"),
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties")
    + ("propertyNames", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies"),
}
MAX_LISTED = 100  # multiples between two bounds that are listed: not every library finds a way to all of them
ALL = ("null", "boolean", "number", "string", "array", "object")
OURS = {"object": (ABSENT, ONLY)}


@dataclass(eq=False, slots=True)
class Node:
    """What one place of the value is held to."""

    path: str
    sources: tuple[Schema, ...]
    is_named: bool = False  # a reference led here
    form: Schema = True  # a schema with nodes in the place of those inside
    conditions: list[list[Node]] = field(default_factory=list)  # finite if of each one some is
    is_finite: bool = False
    why: str = ""  # there is no value
    others: list[str] = field(default_factory=list)  # types that nothing rules out, though the keywords are of another
    uses: int = 0


class NoValue(ValueError):
    pass


class Graph(Protocol):
    """What makes nodes (normal.py)."""

    instances: Instances

    def node(self, sources: Iterable[Schema], path: str) -> Node:
        """Of what all of these say."""

    def spend(self, work: int) -> None: ...


def form_of(name: str, graph: Graph, path: str, parts: list[dict[str, Any]]) -> tuple[Schema, list[list[Node]]]:
    """Of a value of this type, and what must be finite. Raises NoValue."""
    if name in ("number", "integer"):
        return _number(name == "integer", parts), []
    if name == "string":
        return _string(parts), []
    if name == "array":
        return _Array(graph, path, parts).form()
    return _Object(graph, path, parts).form()


def _string(parts: list[dict[str, Any]]) -> Schema:
    low, high = _counts("Length", parts)
    patterns, formats = (list(dict.fromkeys(p[key] for p in parts if key in p)) for key in ("pattern", "format"))
    if len(formats) > 1:
        raise SchemaError("format: two of them for one string are not supported")
    form: dict[str, Any] = {"type": "string"} | ({"format": formats[0]} if formats else {})
    form |= ({"minLength": low} if low else {}) | ({"maxLength": high} if high is not None else {})
    if patterns:
        form["pattern"] = patterns[0]
    if len(patterns) > 1:
        form["allOf"] = [{"pattern": pattern} for pattern in patterns[1:]]
    return form


class _Object:
    """What several schemas say of an object."""

    def __init__(self, graph: Graph, path: str, parts: list[dict[str, Any]]):
        self.graph, self.path = graph, path
        self.parts = [part for part in parts if part.keys() & {*OF_TYPE["object"], *OURS["object"]}]
        self.names = dict.fromkeys(name for part in self.parts for name in part.get("properties", ()))
        self.required = dict.fromkeys(name for part in self.parts for name in part.get("required", ()))
        self.absent = {name for part in self.parts for name in part.get(ABSENT, ())}
        self.patterns = list(dict.fromkeys(p for part in self.parts for p in part.get("patternProperties", ())))
        listed = any("properties" in part and ADDED not in part for part in self.parts)
        says = any("additionalProperties" in part for part in self.parts)
        self.is_closed = listed and not says or any(ONLY in part for part in self.parts)
        self.named = [part["propertyNames"] for part in self.parts if "propertyNames" in part]

    def form(self) -> tuple[Schema, list[list[Node]]]:
        low, high = _counts("Properties", self.parts)
        others = self._others()
        names = dict.fromkeys((*self.names, *self.required, *sorted(self.absent)))
        properties = {name: self._property(name) for name in names if not self._is_out(name, others)}
        if high is not None and high <= len(self.required):
            if high < len(self.required):
                raise NoValue("it has more required properties than maxProperties")
            properties = {name: inner for name, inner in properties.items() if name in self.required}
            others, high = {"additionalProperties": False}, None
        if high is not None and others == {"additionalProperties": False} and high >= len(properties):
            high = None
        if others == {"additionalProperties": False} and low > len(properties):
            raise NoValue("it has fewer properties than minProperties")
        if others == {"additionalProperties": False} and low == len(properties):
            self.required |= dict.fromkeys(properties)
        form: dict[str, Any] = {"type": "object"}
        if properties or others == {"additionalProperties": False}:
            form["properties"] = properties
        form |= {"required": list(self.required)} if self.required else {}
        form |= others | ({"minProperties": low} if low > len(self.required) else {})
        form |= {"maxProperties": high} if high is not None else {}
        return form, [[properties[name]] for name in self.required]

    def _is_out(self, name: str, others: dict[str, Any]) -> bool:
        """Whether it need not be said that it must not come."""
        return name in self.absent and name not in self.required and others == {"additionalProperties": False}

    def _property(self, name: str) -> Node:
        self.graph.spend(len(self.parts))
        sources: list[Schema] = [False] if name in self.absent else []
        is_evaluated = False
        for part in self.parts:
            met = [inner for _, inner in self.graph.instances.met_by(name, part)]
            sources += met
            is_evaluated |= bool(met) and ADDED not in part  # what an `if` says that does not hold evaluates nothing
        if any(not self.graph.instances.fit(name, names) for names in self.named):
            sources.append(False)
        if any(ONLY in part for part in self.parts) and not is_evaluated:
            sources.append(False)
        if name in self.required and any(source is False for source in sources):
            raise NoValue(f"the property {json.dumps(name)} is required, and excluded by what stands beside it")
        return self.graph.node(sources, f"{self.path}/properties/{schemas.escaped(name)}")

    def _others(self) -> dict[str, Any]:
        """Keywords for names that are not listed."""
        general: list[Schema] = [part["additionalProperties"] for part in self.parts if "additionalProperties" in part]
        if self.is_closed:
            general.append(False)
        patterns = {pattern: self._of_pattern(pattern) for pattern in self._distinct()}
        if self.named:
            patterns, general = self._by_name(patterns, general)
        found: dict[str, Any] = {}
        names = {*self.names, *self.absent, *self.required}
        kept = {
            pattern: self.graph.node(sources, f"{self.path}/patternProperties/{schemas.escaped(pattern)}")
            for pattern, sources in patterns.items()
            if not self.graph.instances.only_these(pattern, names)
        }
        if kept:
            found["patternProperties"] = kept
        if False in [source for source in general if isinstance(source, bool)]:
            return found | {"additionalProperties": False}
        if general or self.names or self.absent or self.required:
            found["additionalProperties"] = self.graph.node(general, f"{self.path}/additionalProperties")
        return found

    def _distinct(self) -> list[str]:
        names = {*self.names, *self.absent, *self.required}
        patterns = [p for p in self.patterns if not self.graph.instances.only_these(p, names)]
        for i, one in enumerate(patterns):
            for other in patterns[:i]:
                if self.graph.instances.meet(one, other):
                    raise SchemaError(
                        f"{self.path}/patternProperties: a name may meet both {json.dumps(other)} and "
                        f"{json.dumps(one)}, which is not supported"
                    )
        return patterns

    def _of_pattern(self, pattern: str) -> list[Schema]:
        """Names that match it match no other."""
        found = []
        for part in self.parts:
            if pattern in part.get("patternProperties", ()):
                found.append(part["patternProperties"][pattern])
            elif "additionalProperties" in part:
                found.append(part["additionalProperties"])
        return found

    def _by_name(
        self, patterns: dict[str, list[Schema]], general: list[Schema]
    ) -> tuple[dict[str, list[Schema]], list[Schema]]:
        """The same, where propertyNames hold: what names they are becomes a list of names, or a pattern."""
        saying = [s for s in self.named if s is not True and s not in ({}, {"type": "string"})]
        if False in [source for source in general if isinstance(source, bool)] and not patterns or not saying:
            return patterns, general
        for names in saying:
            listed = values_of(names) if isinstance(names, dict) else []
            if listed is not None:
                self.names |= dict.fromkeys(n for n in listed if isinstance(n, str))
                return {}, [False]
        if len(saying) > 1 or patterns or not saying[0].keys() & {"pattern", "minLength", "maxLength"}:
            raise SchemaError(f"{self.path}/propertyNames is not supported here")
        (names,) = saying
        low, high = _counts("Length", [names])
        pattern = names.get("pattern", rf"^[\s\S]{{{low},{'' if high is None else high}}}$")
        is_simple = schemas.assertions(names) - {"type"} in ({"pattern"}, {"minLength"}, {"maxLength"})
        if not is_simple and schemas.assertions(names) - {"type"} != {"minLength", "maxLength"}:
            raise SchemaError(f"{self.path}/propertyNames is not supported with these keywords beside one another")
        return {pattern: general}, [False]


class _Array:
    """What several schemas say of an array."""

    def __init__(self, graph: Graph, path: str, parts: list[dict[str, Any]]):
        self.graph, self.path, self.parts = graph, path, parts

    def form(self) -> tuple[Schema, list[list[Node]]]:
        low, high = _counts("Items", self.parts)
        for part in self.parts:
            self._refuse(part, high)
        num_first = max(len(part.get("prefixItems", ())) for part in self.parts)
        num_first = num_first if high is None else min(num_first, high)
        first = [self._item(i, "prefixItems") for i in range(num_first)]
        says = any("items" in part for part in self.parts)
        form: dict[str, Any] = {"type": "array"} | ({"prefixItems": first} if first else {})
        conditions = [[item] for item in first[:low]]
        if says or num_first < low:
            form["items"] = self._item(num_first, "items")
            conditions += [[form["items"]]] if num_first < low else []
        elif first:
            form["items"] = False
        form |= ({"minItems": low} if low else {}) | ({"maxItems": high} if high is not None else {})
        return form, conditions

    def _item(self, i: int, keyword: str) -> Node:
        sources = []
        for part in self.parts:
            first = part.get("prefixItems", ())
            sources += [first[i]] if i < len(first) else [part["items"]] if "items" in part else []
        self.graph.spend(len(self.parts))
        return self.graph.node(sources, f"{self.path}/{keyword}" + f"/{i}" * (keyword == "prefixItems"))

    def _refuse(self, part: dict[str, Any], high: int | None) -> None:
        if isinstance(part.get("items"), list):
            raise SchemaError(f"{self.path}/items as a list is the notation of older drafts; use prefixItems")
        if part.get("uniqueItems") and (high is None or high > 1):
            raise SchemaError(f"{self.path}/uniqueItems is not supported, except with maxItems 1")
        if "contains" in part and (part.get("minContains", 1) or "maxContains" in part):
            raise SchemaError(f"{self.path}/contains is not supported")


def types_left(parts: list[dict[str, Any]]) -> tuple[str, ...]:
    """That all parts allow, in the order of the first that names some."""
    found: list[str] | None = None
    for part in parts:
        types = schemas.types_of(part)
        if not types:
            continue
        if found is None:
            found = [t for t in dict.fromkeys(types) if t != "integer" or "number" not in types]
        elif "number" not in types:
            found = ["integer" if t == "number" and "integer" in types else t for t in found]
            found = [t for t in found if t in types]
        else:
            found = [t for t in found if t in types or t == "integer"]
    return ALL if found is None else tuple(found)


def values_of(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def _counts(what: str, parts: Sequence[dict[str, Any]]) -> tuple[int, int | None]:
    low = max((int(part[f"min{what}"]) for part in parts if f"min{what}" in part), default=0)
    high = min((int(part[f"max{what}"]) for part in parts if f"max{what}" in part), default=None)
    if high is not None and low > high:
        raise NoValue(f"min{what} is {low} and max{what} {high}")
    return low, high


def _number(is_integer: bool, parts: list[dict[str, Any]]) -> Schema:
    steps = [exactly(part["multipleOf"]) for part in parts if "multipleOf" in part]
    if any(step <= 0 for step in steps):
        raise SchemaError("multipleOf must be above 0")
    steps += [Fraction(1)] if is_integer else []
    step = None
    if steps:
        step = Fraction(lcm(*(s.numerator for s in steps)), gcd(*(s.denominator for s in steps)))
        is_integer = step.denominator == 1
    lows = [(exactly(p[key]), key != "minimum") for p in parts for key in ("minimum", "exclusiveMinimum") if key in p]
    highs = [(exactly(p[key]), key == "maximum") for p in parts for key in ("maximum", "exclusiveMaximum") if key in p]
    low, high = max(lows, default=None), min(highs, default=None)
    if step is not None:
        return _multiples(is_integer, step, low, high)
    if low and high and (low[0] > high[0] or low[0] == high[0] and (low[1] or not high[1])):
        raise NoValue("no number is so large and so small")
    form: dict[str, Any] = {"type": "number"}
    form |= {("exclusiveMinimum" if low[1] else "minimum"): _plain(low[0])} if low else {}
    return form | ({("maximum" if high[1] else "exclusiveMaximum"): _plain(high[0])} if high else {})


def _multiples(
    is_integer: bool, step: Fraction, low: tuple[Fraction, bool] | None, high: tuple[Fraction, bool] | None
) -> Schema:
    """With the first and the last multiple as bounds, which the bounds themselves need not be."""
    form: dict[str, Any] = {"type": "integer" if is_integer else "number"}
    first = last = None
    if low:
        first = (floor(low[0] / step) + 1 if low[1] else ceil(low[0] / step)) * step
        form["minimum"] = _plain(first)
    if high:
        last = (floor(high[0] / step) if high[1] else ceil(high[0] / step) - 1) * step
        form["maximum"] = _plain(last)
    if first is not None and last is not None and first > last:
        raise NoValue("no number of these multiples is so large and so small")
    if first is not None and first == last:
        return {"const": _plain(first)}
    if step != 1 and first is not None and last is not None and last - first <= MAX_LISTED * step:
        return {"enum": [_plain(first + i * step) for i in range(int((last - first) / step) + 1)]}
    return form | ({"multipleOf": _plain(step)} if step != 1 else {})


def _plain(number: Fraction) -> int | float:
    return int(number) if number.denominator == 1 else float(number)
