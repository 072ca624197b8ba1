"""Whether a value is an instance of a schema, by all keywords of JSON Schema 2020-12 that grammars know or enumerated
values may meet: what `enum` and `const` list is settled here, whatever stands beside them."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

from minivllm.structured.automaton import DEAD, DFA, START, TooLarge, compile_tree
from minivllm.structured.negation import ABSENT, ONLY
from minivllm.structured.regex import RegexError, parse_search
from minivllm.structured.schema import References, Schema, SchemaError, fits_types, key_of, types_of

MAX_WORK = 500_000  # schemas and characters looked at, in one document
_OF_AN_AUTOMATON = 500  # work


class Instances:
    def __init__(self, references: References):
        self.references = references
        self.automaton = cache(self._automaton)
        self._keys: dict[int, frozenset[str]] = {}  # of enumerated values, by the id of their schema
        self.work = 0

    def fit(self, value: Any, schema: Schema) -> bool:
        """Raises SchemaError for what cannot be said."""
        self.spend(1)
        if isinstance(schema, bool):
            return schema
        if not fits_types(value, types_of(schema)):
            return False
        return all(self._holds(key, value, schema) for key in schema)

    def matches(self, pattern: str, text: str) -> bool:
        """As JSON Schema's `pattern`: anywhere in the text."""
        automaton = self.automaton(pattern)
        self.spend(len(text))
        return bool(automaton.accepting[automaton.next(START, text.encode())])

    def spend(self, work: int) -> None:
        self.work += work
        if self.work > MAX_WORK:
            raise SchemaError(f"what its enumerated values and names fit takes over {MAX_WORK:,} steps")

    def _automaton(self, pattern: str) -> DFA:
        try:
            automaton = compile_tree(parse_search(pattern))
            self.spend(_OF_AN_AUTOMATON + 20 * len(automaton.table))
            return automaton
        except (RegexError, TooLarge) as e:
            raise SchemaError(f"the pattern {pattern[:100]!r} is not supported here: {e}") from None

    def _holds(self, key: str, value: Any, schema: dict[str, Any]) -> bool:
        given = schema[key]
        if key == "$ref":
            return self.fit(value, self.references(given))
        if key in ("enum", "const"):
            if id(schema) not in self._keys:
                self._keys[id(schema)] = frozenset(map(key_of, schema.get("enum", [schema.get("const")])))
            return key_of(value) in (self._keys[id(schema)] if key == "enum" else {key_of(given)})
        if key in ("allOf", "anyOf"):
            return (all if key == "allOf" else any)(self.fit(value, inner) for inner in given)
        if key == "oneOf":
            return sum(self.fit(value, inner) for inner in given) == 1
        if key == "not":
            return not self.fit(value, given)
        if key == "if":
            return self.fit(value, schema.get("then" if self.fit(value, given) else "else", True))
        if isinstance(value, str):
            return self._string(key, value, given)
        if isinstance(value, list):
            return self._array(key, value, given, schema)
        if isinstance(value, dict):
            return self._object(key, value, given, schema)
        return isinstance(value, bool) or value is None or _NUMBERS.get(key, _anything)(value, given)

    def _string(self, key: str, value: str, given: Any) -> bool:
        if key == "format":
            raise SchemaError("format is not supported beside enum or const")
        if key == "pattern":
            return self.matches(given, value)
        return _sized(key, "Length", len(value), given)

    def _array(self, key: str, value: list, given: Any, schema: dict[str, Any]) -> bool:
        if key == "unevaluatedItems" or key == "items" and isinstance(given, list):
            raise SchemaError(f"{key} is not supported beside enum or const")
        first = schema.get("prefixItems", ())
        if key == "prefixItems":
            return all(map(self.fit, value, given))
        if key == "items":
            return all(self.fit(item, given) for item in value[len(first) :])
        if key == "contains":
            found = sum(self.fit(item, given) for item in value)
            return schema.get("minContains", 1) <= found <= schema.get("maxContains", found)
        if key == "uniqueItems" and given:
            return len(set(map(key_of, value))) == len(value)
        return _sized(key, "Items", len(value), given)

    def _object(self, key: str, value: dict[str, Any], given: Any, schema: dict[str, Any]) -> bool:
        if key in ("unevaluatedProperties", "dependencies", ONLY):
            name = "unevaluatedProperties" if key == ONLY else key
            raise SchemaError(f"{name} is not supported beside enum or const")
        if key == ABSENT:
            return not value.keys() & set(given)
        if key == "required":
            return value.keys() >= set(given)
        if key in ("properties", "patternProperties", "additionalProperties"):
            met = ((item, s) for name, item in value.items() for k, s in self.met_by(name, schema) if k == key)
            return all(self.fit(item, s) for item, s in met)
        if key == "propertyNames":
            return all(self.fit(name, given) for name in value)
        if key == "dependentRequired":
            return all(value.keys() >= set(needs) for name, needs in given.items() if name in value)
        if key == "dependentSchemas":
            return all(self.fit(value, inner) for name, inner in given.items() if name in value)
        return _sized(key, "Properties", len(value), given)

    def met_by(self, name: str, schema: dict[str, Any]) -> list[tuple[str, Schema]]:
        """The schemas, with their keywords, that the value of a property of this name is held to."""
        found = [("properties", schema["properties"][name])] if name in schema.get("properties", ()) else []
        patterns = schema.get("patternProperties", {}).items()
        found += [("patternProperties", inner) for pattern, inner in patterns if self.matches(pattern, name)]
        others = "additionalProperties"
        return found or ([(others, schema[others])] if others in schema else [])

    def only_these(self, pattern: str, names: set[str]) -> bool:
        """Whether the pattern matches no text but some of these."""
        automaton = self.automaton(pattern)
        begins = {name.encode()[:n] for name in names for n in range(len(name.encode()) + 1)}
        whole = {name.encode() for name in names}
        pending = [(START, b"")]
        for state, text in pending:  # each text that begins a name once
            self.spend(256)
            if automaton.accepting[state] and text not in whole:
                return False
            for byte in range(256):
                following = automaton.next(state, bytes([byte]))
                if following != DEAD and text + bytes([byte]) not in begins:
                    return False  # no state but DEAD is without an end
                if following != DEAD:
                    pending.append((following, text + bytes([byte])))
        return True

    def meet(self, one: str, other: str) -> bool:
        """Whether some text matches both patterns."""
        a, b = self.automaton(one), self.automaton(other)
        steps = {(a.classes[byte], b.classes[byte]) for byte in range(256)}
        pending = [(START, START)]
        seen = set(pending)
        for left, right in pending:
            if a.accepting[left] and b.accepting[right]:
                return True
            self.spend(len(steps))
            for x, y in steps:
                pair = int(a.table[left, x]), int(b.table[right, y])
                if DEAD not in pair and pair not in seen:
                    seen.add(pair)
                    pending.append(pair)
        return False


def exactly(number: int | float) -> Fraction:
    """As it is written: 0.1 is a tenth."""
    return Fraction(number) if isinstance(number, int) else Fraction(repr(number))


def _sized(key: str, what: str, size: int, given: Any) -> bool:
    return not (key == f"min{what}" and size < given or key == f"max{what}" and size > given)


def _anything(value: Any, given: Any) -> bool:
    return True


_NUMBERS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, given: value >= given,
    "maximum": lambda value, given: value <= given,
    "exclusiveMinimum": lambda value, given: value > given,
    "exclusiveMaximum": lambda value, given: value < given,
    "multipleOf": lambda value, given: exactly(value) % exactly(given) == 0,
}
