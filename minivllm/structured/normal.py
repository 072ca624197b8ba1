"""A JSON Schema in a form in which no two keywords speak of the same thing, for backends that read each by itself.

JSON Schema holds a value to all keywords that stand beside one another, wherever they came from: `properties` beside
`$ref`, `anyOf` beside both, a pattern of `patternProperties` that meets a name of `properties`. Libraries that compile
grammars close an object, or read a keyword, where it stands. So what holds for one place of the value is collected from
all of the document first, as a set of schemas; each set becomes a node, keyword by keyword:

    {"$ref": A, "properties": P, "anyOf": [B, C]}     one of {A, P, B} and {A, P, C}
    {A, P, B}                                         an object with A's, P's and B's properties, each of a set again

Sets are nodes once, so references that lead back end. A node that no finite value fits is left out of what has a choice
(unit resolution of Horn clauses, Dowling and Gallier 1984), and one that has to be is an error. The result is a schema
whose objects say which other properties they have, with no allOf, oneOf, not, if, propertyNames or dependencies, and
with anyOf, $ref, enum and const alone where they stand. What cannot be said in that form is refused by name.

Two choices are this engine's, and narrow what is written, never widen it: an object that lists `properties` has no
others unless some additionalProperties says so (and an array that lists `prefixItems` no more unless some `items`
does), and a schema whose keywords are all of one type is of that type.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, floor, gcd, lcm
from typing import Any, NamedTuple

from minivllm.structured import schema as schemas
from minivllm.structured.disjoint import Alternatives
from minivllm.structured.instances import Instances, exactly
from minivllm.structured.negation import ABSENT, ADDED, ONLY, negated
from minivllm.structured.schema import References, Schema, SchemaError

MAX_NODES = 20_000
MAX_WORK = 500_000  # keywords and properties looked at: about a second
MAX_COMBINATIONS = 1_000  # of alternatives of several anyOf that hold at once
MAX_EXCLUDING = 8  # alternatives of a oneOf that may fit the same value
MAX_INLINED = 40  # nodes inside nodes before one becomes a definition
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
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
_NEVER = ("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "dependencies", "unevaluatedItems")
_WITHOUT_EFFECT = {"then", "else", "$anchor"}  # `then` says nothing without `if`


class Normal(NamedTuple):
    schema: Schema
    places: dict[int, str]  # where each schema in it came from, by its id

    def subschemas(self) -> Iterator[schemas.Place]:
        for place in schemas.subschemas(self.schema):
            yield schemas.Place(self.places.get(id(place.schema), place.path), place.schema)


def normal(text: str) -> Normal:
    """Raises SchemaError for what is no schema, what no value fits, and what cannot be said in this form."""
    root, references = schemas.load(text)
    try:
        return _Graph(root, references).written()
    except RecursionError:
        raise SchemaError("an enumerated value is nested too deeply") from None


@dataclass(eq=False, slots=True)
class _Node:
    """What one place of the value is held to."""

    path: str
    sources: tuple[Schema, ...]
    is_named: bool = False  # a reference led here
    form: Schema = True  # a schema with nodes in the place of those inside
    conditions: list[list[_Node]] = field(default_factory=list)  # finite if of each one some is
    is_finite: bool = False
    why: str = ""  # there is no value
    others: list[str] = field(default_factory=list)  # types that nothing rules out, though the keywords are of another
    uses: int = 0


class _NoValue(ValueError):
    pass


class _Graph:
    def __init__(self, root: Schema, references: References):
        self.references = references
        self.instances = Instances(references)
        self.alternatives = Alternatives(references)
        self.paths: dict[int, str] = {}
        self.nodes: dict[frozenset[int], _Node] = {}
        self.pending: list[_Node] = []
        self.parts: dict[int, _Part] = {}
        self.negations: dict[int, Schema] = {}
        self.kept: list[Any] = []  # ids are keys: nothing may go
        self.work = 0
        self.note(root, "#")
        self.root = self.node((root,), "#")
        for node in self.pending:  # grows while it is read
            self.read(node)
        self._find_finite()
        if self._others_are_needed():
            self._find_finite()
        if not self.root.is_finite:
            raise SchemaError(f"#: no value fits{self._because()}")

    # ------------------------------------------------------------------------------------------------------- reading

    def note(self, schema: Schema, path: str) -> None:
        for place in schemas.subschemas(schema, path):
            if isinstance(place.schema, dict):
                self.paths.setdefault(id(place.schema), place.path)

    def spend(self, work: int) -> None:
        self.work += work
        if self.work > MAX_WORK:
            raise SchemaError(f"taking together what holds for the same value takes over {MAX_WORK:,} steps")

    def node(self, sources: Iterable[Schema], path: str) -> _Node:
        """Of what all of these say."""
        followed, is_named = {}, False
        for source in sources:
            while isinstance(source, dict) and "$ref" in source and schemas.assertions(source) == {"$ref"}:
                source, is_named = self.references(source["$ref"]), True
                self.spend(1)
            if source is not True:
                followed[id(source)] = source
        key = frozenset(followed)
        if key not in self.nodes:
            if len(self.nodes) >= MAX_NODES:
                raise SchemaError(f"{path}: over {MAX_NODES:,} schemas once keywords beside one another are one")
            if len(followed) == 1:
                path = self.paths.get(*key, path)
            self.nodes[key] = _Node(path, tuple(followed.values()))
            self.pending.append(self.nodes[key])
        node = self.nodes[key]
        node.is_named |= is_named
        node.uses += 1
        return node

    def made(self, path: str, form: Schema, conditions: Sequence[list[_Node]] = ()) -> _Node:
        """One that no set of schemas stands for."""
        node = _Node(path, (), form=form, conditions=list(conditions), uses=1)
        self.nodes[frozenset((id(node),))] = node
        return node

    def read(self, node: _Node) -> None:
        try:
            parts, choices = self._flattened(node)
            values = next((_values(part) for part in parts if _values(part) is not None), None)
            if values is not None:
                fitting = [v for v in values if all(self.instances.fit(v, s) for s in node.sources)]
                if not fitting:
                    raise _NoValue("none of the enumerated values fits the keywords beside them")
                node.form = {"enum": fitting} if len(fitting) > 1 else {"const": fitting[0]}
            elif choices:
                self._read_choice(node, parts, choices)
            else:
                self._read_parts(node, parts)
        except _NoValue as e:
            node.form, node.why, node.conditions = False, f"{node.path}: {e}", [[]]
        except SchemaError as e:
            raise e if str(e).startswith("#") else SchemaError(f"{node.path}: {e}") from None

    def _flattened(self, node: _Node) -> tuple[list[dict[str, Any]], list[list[Schema]]]:
        """What a node's schemas say themselves, in the document's order, and the alternatives that they leave."""
        parts: list[dict[str, Any]] = []
        choices: dict[int, list[Schema]] = {}
        seen: set[int] = set()
        pending = list(reversed(node.sources))
        while pending:
            schema = pending.pop()
            if schema is False:
                raise _NoValue("no value fits false")
            if schema is True or id(schema) in seen:
                continue
            seen.add(id(schema))
            part = self._part(schema, node)
            self.spend(1 + len(schema) + len(part.inner))
            parts += [part.own] if part.own else []
            for alternatives in part.choices:
                if len(alternatives) == 1:
                    part.inner.append(alternatives[0])
                else:
                    choices[id(alternatives)] = alternatives
            pending += reversed(part.inner)
        return parts, list(choices.values())

    def _part(self, schema: dict[str, Any], node: _Node) -> _Part:
        if id(schema) not in self.parts:
            self.kept.append(schema)
            self.parts[id(schema)] = _Part(*self._split(schema, node))
        part = self.parts[id(schema)]
        if part.is_scoped and (len(node.sources) != 1 or node.sources[0] is not schema):
            raise SchemaError(f"{self.path_of(schema, node)}/unevaluatedProperties is not supported inside of others")
        return part

    def path_of(self, schema: Schema, node: _Node) -> str:
        return self.paths.get(id(schema), node.path)

    def _split(self, schema: dict[str, Any], node: _Node) -> tuple:
        path = self.path_of(schema, node)
        keywords = schemas.assertions(schema) | (schema.keys() & {ABSENT, ADDED, ONLY})
        own, inner, choices, is_scoped = {}, [], [], False
        for key, value in schema.items():
            if key in _NEVER and key in keywords:
                raise SchemaError(f"{path}/{key} is not supported")
            if key == "$ref":
                inner.append(self.references(value))
            elif key == "allOf":
                inner += value
            elif key == "anyOf":
                choices.append(value)
            elif key == "oneOf":
                choices.append(value if _has_values(schema) else self._exactly_one(value, path))
            elif key in ("dependentRequired", "dependentSchemas"):
                choices += [self._dependency(name, needs) for name, needs in value.items()]
            elif key == "not" and (alternatives := negated(value, self.negation)) is not None:
                choices.append(alternatives or [False])
            elif key == "if" and negated(value, self.negation) is not None:
                others = [self.negation(value), schema.get("else", True)]
                choices.append([{"allOf": [value, schema.get("then", True)]}, {"allOf": others}])
            elif key == "unevaluatedProperties":
                if value is not True:
                    is_scoped = True
                    if value is not False or _has_negations(schema):
                        raise SchemaError(f"{path}/{key} is not supported, except as true or false and without `not`")
                    own[ONLY] = True
            elif key == "nullable" and value is not False:
                raise SchemaError(f'{path}/nullable is not JSON Schema\'s: use "type": [..., "null"]')
            elif key in keywords and key not in _WITHOUT_EFFECT and key != "nullable":
                own[key] = value
        return own if own != schema else schema, inner, choices, is_scoped

    def _exactly_one(self, alternatives: list[Schema], path: str) -> list[Schema]:
        """The same; where two may both fit, each without those that it may fit as well."""
        pair = self.alternatives.overlapping(alternatives)
        if pair is None:
            return alternatives
        can_be_negated = all(negated(inner, self.negation) is not None for inner in alternatives)
        if len(alternatives) > MAX_EXCLUDING or not can_be_negated:
            raise SchemaError(f"{path}/oneOf: alternatives {pair[0]} and {pair[1]} may both fit one value; use anyOf")
        return [
            {"allOf": [one, *(self.negation(other) for other in alternatives if self._may_meet(one, other))]}
            for one in alternatives
        ]

    def _may_meet(self, one: Schema, other: Schema) -> bool:
        return one is not other and self.alternatives.overlapping([one, other]) is not None

    def negation(self, schema: Schema) -> Schema:
        """Of one schema always the same."""
        if isinstance(schema, bool):
            return not schema
        if id(schema) not in self.negations:
            self.negations[id(schema)] = {"not": schema}
            self.kept.append(schema)
        return self.negations[id(schema)]

    def _dependency(self, name: str, needs: Any) -> list[Schema]:
        """Without a property of this name; or with it, and what it needs."""
        present: dict[str, Any] = {"required": [name, *needs] if isinstance(needs, list) else [name]}
        if not isinstance(needs, list):
            present["allOf"] = [needs]
        return [{ABSENT: [name]}, present]

    def _read_choice(self, node: _Node, parts: list[dict[str, Any]], choices: list[list[Schema]]) -> None:
        combinations = 1
        for alternatives in choices:
            combinations *= len(alternatives)
        if len(choices) > 1 and combinations > MAX_COMBINATIONS:
            raise SchemaError(f"{node.path}: anyOf, oneOf or dependencies that hold at once have over "
                              f"{MAX_COMBINATIONS:,} combinations")  # fmt: skip
        first, *others = choices
        rest = [{"anyOf": alternatives} for alternatives in others]
        self.kept += rest
        inner = [self.node((*parts, alternative, *rest), self.path_of(alternative, node)) for alternative in first]
        inner = list(dict.fromkeys(inner))
        node.form, node.conditions = {"anyOf": inner}, [inner]

    # -------------------------------------------------------------------------------------------- of each type its own

    def _read_parts(self, node: _Node, parts: list[dict[str, Any]]) -> None:
        for part in parts:
            self._refuse(part, node)
        types = _types(parts)
        if not types:
            raise _NoValue("no type is left")
        of_parts = {key for part in parts for key in part}
        about = [name for name, keys in OF_TYPE.items() if of_parts.intersection((*keys, *_OURS.get(name, ())))]
        if len(about) == 1 and not any("type" in part for part in parts):
            node.others = [name for name in types if name not in about]
            types = tuple(about)
        bare = [name for name in types if {"integer": "number"}.get(name, name) not in about]
        if len(bare) == len(types):
            node.form = {"type": list(types) if len(types) > 1 else types[0]} if set(types) != set(_ALL) else True
            return
        found, why = [self.made(node.path, {"type": bare if len(bare) > 1 else bare[0]})] if bare else [], ""
        for name in types:
            if name not in bare:
                try:
                    found.append(self.made(node.path, *self._form(name, node.path, parts)))
                except _NoValue as e:
                    why = why or str(e)
        if not found:
            raise _NoValue(why)
        if len(found) == 1:
            node.form, node.conditions = found[0].form, found[0].conditions
        else:
            node.form, node.conditions = {"anyOf": found}, [found]

    def _refuse(self, part: dict[str, Any], node: _Node) -> None:
        for key in ("not", "if"):
            if key in part:
                what = "not (of `not`, of an `if` and its `else`, or of a oneOf)" if key == "not" else key
                why = "is not supported with these keywords, except beside enum or const"
                raise SchemaError(f"{self.path_of(part, node)}/{what} {why}")

    def _form(self, name: str, path: str, parts: list[dict[str, Any]]) -> tuple[Schema, list[list[_Node]]]:
        if name in ("number", "integer"):
            return _number(name == "integer", parts), []
        if name == "string":
            return self._string(parts), []
        if name == "array":
            return _Array(self, path, parts).form()
        return _Object(self, path, parts).form()

    def _string(self, parts: list[dict[str, Any]]) -> Schema:
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

    # ----------------------------------------------------------------------------------------------------- what is left

    def _find_finite(self) -> None:
        meets: dict[int, list[tuple[_Node, int]]] = {}
        unmet: dict[int, int] = {}
        finite: list[_Node] = []
        for node in self.nodes.values():
            unmet[id(node)] = len(node.conditions)
            for which, others in enumerate(node.conditions):
                for other in others:
                    meets.setdefault(id(other), []).append((node, which))
            if not node.conditions:
                finite.append(node)
        met: set[tuple[int, int]] = set()
        for found in finite:  # grows while it is read
            found.is_finite = True
            for node, which in meets.get(id(found), ()):
                if (id(node), which) not in met:
                    met.add((id(node), which))
                    unmet[id(node)] -= 1
                    if not unmet[id(node)]:
                        finite.append(node)

    def _others_are_needed(self) -> bool:
        """Whether a schema that names no type has values of other types alone than its keywords are of."""
        needed = [node for node in self.nodes.values() if node.others and not node.is_finite]
        for node in needed:
            inner = [self.made(node.path, node.form, node.conditions), self.made(node.path, {"type": node.others})]
            node.form, node.conditions = {"anyOf": inner}, [inner]
        return bool(needed)

    def _because(self) -> str:
        reasons = (node.why for node in self.nodes.values() if node.why)
        why = next(reasons, None)
        return f" ({why})" if why else ", since each would have to hold another one of its kind"

    def written(self) -> Normal:
        return _Writer(self).normal()


class _Part(NamedTuple):
    """What one schema says."""

    own: dict[str, Any]
    inner: list[Schema]  # that hold, too
    choices: list[list[Schema]]
    is_scoped: bool  # its unevaluatedProperties looks at what stands beside it, and not around it


class _Object:
    """What several schemas say of an object."""

    def __init__(self, graph: _Graph, path: str, parts: list[dict[str, Any]]):
        self.graph, self.path = graph, path
        self.parts = [part for part in parts if part.keys() & {*OF_TYPE["object"], *_OURS["object"]}]
        self.names = dict.fromkeys(name for part in self.parts for name in part.get("properties", ()))
        self.required = dict.fromkeys(name for part in self.parts for name in part.get("required", ()))
        self.absent = {name for part in self.parts for name in part.get(ABSENT, ())}
        self.patterns = list(dict.fromkeys(p for part in self.parts for p in part.get("patternProperties", ())))
        listed = any("properties" in part and ADDED not in part for part in self.parts)
        says = any("additionalProperties" in part for part in self.parts)
        self.is_closed = listed and not says or any(ONLY in part for part in self.parts)
        self.named = [part["propertyNames"] for part in self.parts if "propertyNames" in part]

    def form(self) -> tuple[Schema, list[list[_Node]]]:
        low, high = _counts("Properties", self.parts)
        others = self._others()
        names = dict.fromkeys((*self.names, *self.required, *sorted(self.absent)))
        properties = {name: self._property(name) for name in names if not self._is_out(name, others)}
        if high is not None and high <= len(self.required):
            if high < len(self.required):
                raise _NoValue("it has more required properties than maxProperties")
            properties = {name: inner for name, inner in properties.items() if name in self.required}
            others, high = {"additionalProperties": False}, None
        if high is not None and others == {"additionalProperties": False} and high >= len(properties):
            high = None
        if others == {"additionalProperties": False} and low > len(properties):
            raise _NoValue("it has fewer properties than minProperties")
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

    def _property(self, name: str) -> _Node:
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
            raise _NoValue(f"the property {json.dumps(name)} is required, and excluded by what stands beside it")
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
            listed = _values(names) if isinstance(names, dict) else []
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

    def __init__(self, graph: _Graph, path: str, parts: list[dict[str, Any]]):
        self.graph, self.path, self.parts = graph, path, parts

    def form(self) -> tuple[Schema, list[list[_Node]]]:
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

    def _item(self, i: int, keyword: str) -> _Node:
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


class _Writer:
    """The nodes as one document."""

    def __init__(self, graph: _Graph):
        self.graph = graph
        self.names: dict[int, str] = {}
        self.places: dict[int, str] = {}
        self.pending: list[_Node] = []

    def normal(self) -> Normal:
        root = self.schema(self.graph.root, 0)
        if not isinstance(root, dict):
            return Normal(root, self.places)
        definitions = {}
        for node in self.pending:  # grows while it is read
            definitions[self.names[id(node)]] = self.schema(node, 0)
        if id(self.graph.root) in self.names and definitions:
            root = {"$ref": f"#/$defs/{self.names[id(self.graph.root)]}"}
        return Normal(root | {"$defs": definitions} if definitions else root, self.places)

    def inner(self, node: _Node, depth: int) -> Schema:
        if not node.is_finite:
            return False
        if isinstance(node.form, bool) or node.form.keys() <= _SHORT or not (
            node.is_named or node.uses > 1 or depth > MAX_INLINED or node is self.graph.root
        ):  # fmt: skip
            return self.schema(node, depth)
        if id(node) not in self.names:
            self.names[id(node)] = str(len(self.names))
            self.pending.append(node)
        return {"$ref": f"#/$defs/{self.names[id(node)]}"}

    def schema(self, node: _Node, depth: int) -> Schema:
        if isinstance(node.form, bool):
            return node.form
        written = self._written(node.form, depth + 1)
        if isinstance(written, dict):
            self.graph.kept.append(written)
            self.places[id(written)] = node.path
        return written

    def _written(self, form: dict[str, Any], depth: int) -> Schema:
        written = dict(form)
        if "anyOf" in form:
            found = [self.inner(inner, depth) for inner in form["anyOf"] if inner.is_finite]
            return found[0] if len(found) == 1 else {"anyOf": found}
        for key in ("properties", "patternProperties"):
            if key in form:
                written[key] = {name: self.inner(inner, depth) for name, inner in form[key].items()}
        if form.get("additionalProperties", True) is not False and "additionalProperties" in form:
            written["additionalProperties"] = self.inner(form["additionalProperties"], depth)
        if written.get("additionalProperties") is False:  # then what must not come need not be said, patterns aside
            key = "patternProperties" if "patternProperties" in written else "properties"
            written[key] = {name: inner for name, inner in written.get(key, {}).items() if inner is not False}
        return self._array(form, written, depth) if written.get("type") == "array" else written

    def _array(self, form: dict[str, Any], written: dict[str, Any], depth: int) -> dict[str, Any]:
        first = form.get("prefixItems", ())
        ends = next((i for i, inner in enumerate(first) if not inner.is_finite), None)
        if first:
            written["prefixItems"] = [self.inner(inner, depth) for inner in first[:ends]]
        if ends is not None:
            written["items"] = False
        elif isinstance(form.get("items"), _Node):
            written["items"] = self.inner(form["items"], depth)
        if written.get("items") is False and not written.get("prefixItems"):
            written.pop("prefixItems", None)
            written |= {"items": {"type": "null"}, "maxItems": 0}  # which there are none of
        return written


_ALL = ("null", "boolean", "number", "string", "array", "object")
_OURS = {"object": (ABSENT, ONLY)}
_SHORT = {"type"}  # a schema of this alone is written out


def _types(parts: list[dict[str, Any]]) -> tuple[str, ...]:
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
    return _ALL if found is None else tuple(found)


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def _has_values(schema: dict[str, Any]) -> bool:
    return "enum" in schema or "const" in schema


def _has_negations(schema: dict[str, Any]) -> bool:
    return any(isinstance(place.schema, dict) and "not" in place.schema for place in schemas.subschemas(schema))


def _counts(what: str, parts: Sequence[dict[str, Any]]) -> tuple[int, int | None]:
    low = max((int(part[f"min{what}"]) for part in parts if f"min{what}" in part), default=0)
    high = min((int(part[f"max{what}"]) for part in parts if f"max{what}" in part), default=None)
    if high is not None and low > high:
        raise _NoValue(f"min{what} is {low} and max{what} {high}")
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
        raise _NoValue("no number is so large and so small")
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
        raise _NoValue("no number of these multiples is so large and so small")
    if first is not None and first == last:
        return {"const": _plain(first)}
    return form | ({"multipleOf": _plain(step)} if step != 1 else {})


def _plain(number: Fraction) -> int | float:
    return int(number) if number.denominator == 1 else float(number)
