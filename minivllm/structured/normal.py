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

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from minivllm.structured import schema as schemas
from minivllm.structured.disjoint import Alternatives
from minivllm.structured.instances import Instances
from minivllm.structured.negation import ABSENT, ADDED, ONLY, negated
from minivllm.structured.normal_forms import ALL, OF_TYPE, OURS, Node, NoValue, form_of, types_left, values_of
from minivllm.structured.schema import References, Schema, SchemaError

MAX_NODES = 20_000
MAX_WORK = 500_000  # keywords and properties looked at: about a second
MAX_COMBINATIONS = 1_000  # of alternatives of several anyOf that hold at once
MAX_EXCLUDING = 8  # alternatives of a oneOf that may fit the same value
MAX_INLINED = 40  # nodes inside nodes before one becomes a definition
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


class _Graph:
    def __init__(self, root: Schema, references: References):
        self.references = references
        self.instances = Instances(references)
        self.alternatives = Alternatives(references)
        self.paths: dict[int, str] = {}
        self.nodes: dict[frozenset[int], Node] = {}
        self.pending: list[Node] = []
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

    def node(self, sources: Iterable[Schema], path: str) -> Node:
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
            self.nodes[key] = Node(path, tuple(followed.values()))
            self.pending.append(self.nodes[key])
        node = self.nodes[key]
        node.is_named |= is_named
        node.uses += 1
        return node

    def made(self, path: str, form: Schema, conditions: Sequence[list[Node]] = ()) -> Node:
        """One that no set of schemas stands for."""
        node = Node(path, (), form=form, conditions=list(conditions), uses=1)
        self.nodes[frozenset((id(node),))] = node
        return node

    def read(self, node: Node) -> None:
        try:
            parts, choices = self._flattened(node)
            values = next((values_of(part) for part in parts if values_of(part) is not None), None)
            if values is not None:
                fitting = [v for v in values if all(self.instances.fit(v, s) for s in node.sources)]
                if not fitting:
                    raise NoValue("none of the enumerated values fits the keywords beside them")
                node.form = {"enum": fitting} if len(fitting) > 1 else {"const": fitting[0]}
            elif choices:
                self._read_choice(node, parts, choices)
            else:
                self._read_parts(node, parts)
        except NoValue as e:
            node.form, node.why, node.conditions = False, f"{node.path}: {e}", [[]]
        except SchemaError as e:
            raise e if str(e).startswith("#") else SchemaError(f"{node.path}: {e}") from None

    def _flattened(self, node: Node) -> tuple[list[dict[str, Any]], list[list[Schema]]]:
        """What a node's schemas say themselves, in the document's order, and the alternatives that they leave."""
        parts: list[dict[str, Any]] = []
        choices: dict[int, list[Schema]] = {}
        seen: set[int] = set()
        pending = list(reversed(node.sources))
        while pending:
            schema = pending.pop()
            if schema is False:
                raise NoValue("no value fits false")
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

    def _part(self, schema: dict[str, Any], node: Node) -> _Part:
        if id(schema) not in self.parts:
            self.kept.append(schema)
            self.parts[id(schema)] = _Part(*self._split(schema, node))
        part = self.parts[id(schema)]
        if part.is_scoped and (len(node.sources) != 1 or node.sources[0] is not schema):
            raise SchemaError(f"{self.path_of(schema, node)}/unevaluatedProperties is not supported inside of others")
        return part

    def path_of(self, schema: Schema, node: Node) -> str:
        return self.paths.get(id(schema), node.path)

    def _split(self, schema: dict[str, Any], node: Node) -> tuple:
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

    def _read_choice(self, node: Node, parts: list[dict[str, Any]], choices: list[list[Schema]]) -> None:
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

    def _read_parts(self, node: Node, parts: list[dict[str, Any]]) -> None:
        for part in parts:
            self._refuse(part, node)
        types = types_left(parts)
        if not types:
            raise NoValue("no type is left")
        of_parts = {key for part in parts for key in part}
        about = [name for name, keys in OF_TYPE.items() if of_parts.intersection((*keys, *OURS.get(name, ())))]
        if len(about) == 1 and not any("type" in part for part in parts):
            node.others = [name for name in types if name not in about]
            types = tuple(about)
        bare = [name for name in types if {"integer": "number"}.get(name, name) not in about]
        if len(bare) == len(types):
            node.form = {"type": list(types) if len(types) > 1 else types[0]} if set(types) != set(ALL) else True
            return
        found, why = [self.made(node.path, {"type": bare if len(bare) > 1 else bare[0]})] if bare else [], ""
        for name in types:
            if name not in bare:
                try:
                    found.append(self.made(node.path, *form_of(name, self, node.path, parts)))
                except NoValue as e:
                    why = why or str(e)
        if not found:
            raise NoValue(why)
        if len(found) == 1:
            node.form, node.conditions = found[0].form, found[0].conditions
        else:
            node.form, node.conditions = {"anyOf": found}, [found]

    def _refuse(self, part: dict[str, Any], node: Node) -> None:
        for key in ("not", "if"):
            if key in part:
                what = "not (of `not`, of an `if` and its `else`, or of a oneOf)" if key == "not" else key
                why = "is not supported with these keywords, except beside enum or const"
                raise SchemaError(f"{self.path_of(part, node)}/{what} {why}")

    # ----------------------------------------------------------------------------------------------------- what is left

    def _find_finite(self) -> None:
        meets: dict[int, list[tuple[Node, int]]] = {}
        unmet: dict[int, int] = {}
        finite: list[Node] = []
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


class _Writer:
    """The nodes as one document."""

    def __init__(self, graph: _Graph):
        self.graph = graph
        self.names: dict[int, str] = {}
        self.places: dict[int, str] = {}
        self.pending: list[Node] = []

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

    def inner(self, node: Node, depth: int) -> Schema:
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

    def schema(self, node: Node, depth: int) -> Schema:
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
        elif isinstance(form.get("items"), Node):
            written["items"] = self.inner(form["items"], depth)
        if written.get("items") is False and not written.get("prefixItems"):
            written.pop("prefixItems", None)
            written |= {"items": {"type": "null"}, "maxItems": 0}  # which there are none of
        return written


_SHORT = {"type"}  # a schema of this alone is written out


def _has_values(schema: dict[str, Any]) -> bool:
    return "enum" in schema or "const" in schema


def _has_negations(schema: dict[str, Any]) -> bool:
    return any(isinstance(place.schema, dict) and "not" in place.schema for place in schemas.subschemas(schema))
