"""Grammars: masks equal over the backends, rolling back, ending, compiling once."""

from __future__ import annotations

import json
import random
import re
import threading
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from grammar_driver import BACKENDS, allowed, choose, compiler, draw, vocabulary

from minivllm.engine.vocabulary import make_vocabulary
from minivllm.errors import BadRequest
from minivllm.structured.base import Vocabulary, unpack
from minivllm.structured.compiler import GrammarCompiler, shared_compiler
from minivllm.structured.dfa import DFABackend
from minivllm.structured.params import MAX_CHARS, StructuredParams
from minivllm.structured.trie import TokenTrie

EOS = vocabulary().eos_ids[0]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "hot": {"type": "boolean"}, "n": {"type": "null"}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
# The same language for all three, byte for byte.
COMMON = [
    *(
        StructuredParams(regex=pattern)
        for pattern in (
            *(r"[a-c]{3}-\d{2,4}", r"(foo|ba[rz])+", r"\w+@\w+\.(com|org)", r".{1,8}", r"[^a-z]{2,5}", r"(?:ab?)*c"),
            *(r"[äöü日]{1,3}x", r"\s\S{2}\D", r"^abc$", r"a|^b$", r"(a|b)*abb", r"\.\*\\\/\-", r"[\]\-a]{2}", "😀+"),
            *(r"\u00e9\x41", r"a{0}b", r"[^\n]{3}", r"(?P<x>hello)( world)?", r"\W{2}", r"\t\n", r"a??b+?", "a/b//c"),
        )
    ),
    *(
        StructuredParams(choice=choice)
        for choice in (["yes", "no"], ["a", "ab", "abc"], ["日本", 'naïve\n"x"\\'], ["hello world", "hello there"])
    ),
    *(
        StructuredParams(json=schema, disable_any_whitespace=compact)
        for compact in (True, False)
        for schema in (
            *({"type": "boolean"}, {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}),
            *(WEATHER, {"anyOf": [{"type": "boolean"}, {"const": "xé"}]}, {"type": "integer", "minimum": 7}),
            {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False, "minItems": 2},
        )
    ),
]


@pytest.mark.parametrize("params", COMMON, ids=lambda p: f"{p.kind}-{p.value}"[:50])
def test_all_backends_give_the_same_masks(params):
    compiled = [compiler(name).compile(params) for name in BACKENDS]
    for seed in range(5):
        rng, out = random.Random(seed), b""
        grammars = [c.start() for c in compiled]
        for _ in range(30):
            masks = np.array([allowed(g) for g in grammars])
            odd = [vocabulary().tokens[i] for i in np.flatnonzero((masks != masks[0]).any(0))]
            assert not odd, f"after {out!r} {tuple(BACKENDS)} differ on {odd[:5]}"
            token = choose(masks[0], rng)
            assert all(g.accept(token) for g in grammars)
            out += vocabulary().tokens[token]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("pattern", ["[ho]e?l{0,2}o", "(é|he)(l|lo)?", "(h[el]l|th?e) ?w?", "(日|日本){2}"])
def test_a_mask_holds_exactly_the_tokens_that_keep_a_prefix(name, pattern):
    """The language counted out with re, and every token tried by itself."""
    words = ("".join(letters) for n in range(6) for letters in product("helotw é日本", repeat=n))
    language = [word.encode() for word in words if re.fullmatch(pattern, word)]
    prefixes = {word[:n] for word in language for n in range(len(word) + 1)}
    compiled = compiler(name).compile(StructuredParams(regex=pattern))
    for seed in range(20):
        rng, out, grammar = random.Random(seed), b"", compiled.start()
        while True:
            mask = allowed(grammar)
            wanted = [i for i, token in enumerate(vocabulary().tokens) if token and out + token in prefixes]
            wanted += [EOS] if out in language else []
            assert np.flatnonzero(mask).tolist() == sorted(wanted), out
            token = choose(mask, rng)
            assert grammar.accept(token)
            if token == EOS:
                break
            out += vocabulary().tokens[token]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "params",
    [StructuredParams(regex="(ab|ba){2,9}"), StructuredParams(json=WEATHER), StructuredParams(choice=["é", "èa"])],
    ids=lambda p: p.kind,
)
def test_rolling_back_leads_to_where_it_was(name, params):
    compiled = compiler(name).compile(params)
    for seed in range(10):
        rng, grammar, taken, masks = random.Random(seed), compiled.start(), [], []
        for _ in range(60):
            masks.append(allowed(grammar))
            token = choose(masks[-1], rng)
            assert grammar.accept(token)
            taken.append(token)
            if rng.random() < 0.3:
                num = rng.randrange(len(taken) + 1)
                grammar.rollback(num)
                del taken[len(taken) - num :]
                assert (allowed(grammar) == (masks[len(taken)] if len(taken) < len(masks) else allowed(grammar))).all()
                del masks[len(taken) :]
        fresh = compiled.start()
        assert all(fresh.accept(token) for token in taken)
        assert (allowed(fresh) == allowed(grammar)).all() and fresh.is_terminated == grammar.is_terminated


@pytest.mark.parametrize("name", BACKENDS)
def test_the_end_is_allowed_when_the_output_is_whole_and_nothing_else_after_it(name):
    grammar = compiler(name).compile(StructuredParams(regex="ab?")).start()
    a, b = (vocabulary().tokens.index(letter) for letter in (b"a", b"b"))
    assert not grammar.accept(EOS) and not grammar.accept(b) and not allowed(grammar)[EOS]
    assert grammar.accept(a) and allowed(grammar)[EOS] and allowed(grammar)[b]
    assert not grammar.accept(a), "refused, and nothing has changed"
    assert grammar.accept(b) and np.flatnonzero(allowed(grammar)).tolist() == [EOS]
    assert not grammar.is_terminated and grammar.accept(EOS) and grammar.is_terminated
    assert np.flatnonzero(allowed(grammar)).tolist() == [EOS]
    assert grammar.accept(EOS) and not grammar.accept(a)  # the engine may go on: min_tokens, ignore_eos
    grammar.rollback(3)
    assert not grammar.is_terminated and allowed(grammar)[b]


@pytest.mark.parametrize("name", BACKENDS)
def test_every_token_that_ends_a_sequence_is_allowed_at_the_end(name):
    tokens = [b"", b"a", b"", b"b", b"aa", b""]
    make = GrammarCompiler(lambda: Vocabulary(tokens, (5, 2)), [(name, BACKENDS[name])])
    grammar = make.compile(StructuredParams(regex="a+")).start()
    mask = np.zeros(1, np.int32)
    grammar.fill_mask(mask)
    assert np.flatnonzero(unpack(mask, 6)).tolist() == [1, 4]
    assert grammar.accept(1)
    grammar.fill_mask(mask)
    assert np.flatnonzero(unpack(mask, 6)).tolist() == [1, 2, 4, 5]
    assert grammar.accept(2) and grammar.is_terminated
    grammar.fill_mask(mask)
    assert np.flatnonzero(unpack(mask, 6)).tolist() == [2, 5]


@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
def test_a_grammar_in_llamacpps_notation(name):
    grammar = 'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9] | "(" expr ")"\n'
    compiled = compiler(name).compile(StructuredParams(grammar=grammar))
    for seed in range(20):
        out, done = draw(compiled.start(), random.Random(seed))
        assert not done or isinstance(eval(out), int)


def test_a_grammar_in_larks_notation_is_taken_by_llguidance():
    compiled = compiler().compile(StructuredParams(grammar='start: "a" NUMBER\nNUMBER: /[0-9]{2}/\n'))
    out, done = draw(compiled.start(), random.Random(0))
    assert done and re.fullmatch(r"a\d\d", out.decode())


@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
def test_any_json_object(name):
    import json

    compiled = compiler(name).compile(StructuredParams(json_object=True))
    done = [out for out, done in (draw(compiled.start(), random.Random(seed)) for seed in range(20)) if done]
    assert len(done) > 10 and all(isinstance(json.loads(out), dict) for out in done)


@pytest.mark.parametrize(
    "params, why",
    [
        (StructuredParams(json_object=True), "nests without bound"),
        (StructuredParams(grammar='root ::= "a"'), "may nest without bound"),
        (StructuredParams(json={"type": "array"}), "any value is allowed"),
        (StructuredParams(regex="(a|b)*a(a|b){20}"), "too large"),
    ],
    ids=lambda p: getattr(p, "kind", None),
)
def test_what_the_automaton_cannot_do_is_refused_by_name(params, why):
    with pytest.raises(BadRequest, match=why):
        compiler("dfa").compile(params)


@pytest.mark.parametrize(
    "given, why",
    [
        ({}, "exactly one"), ({"regex": "a", "choice": ["b"]}, "exactly one"), ({"regex": ""}, "non-empty"),
        ({"choice": []}, "non-empty"), ({"choice": "ab"}, "list"), ({"choice": [""]}, "non-empty"),
        ({"json": 3}, "JSON Schema"), ({"grammar": 3}, "non-empty"),
        ({"regex": "a" * (MAX_CHARS["regex"] + 1)}, "more than"),
        ({"json": {"x": object()}}, "JSON Schema"), ({"regex": "a", "disable_any_whitespace": True}, "for JSON"),
    ],
)  # fmt: skip
def test_a_specification_says_one_thing(given, why):
    with pytest.raises(BadRequest, match=why) as e:
        StructuredParams(**given, field="where")
    assert e.value.param == "where"


@pytest.mark.parametrize("names", [(), *((name,) for name in BACKENDS)], ids=str)
@pytest.mark.parametrize("params", [{"regex": "(a"}, {"json": {"type": 1}}, {"json": "["}], ids=str)
def test_an_error_names_the_field(params, names):
    with pytest.raises(BadRequest) as e:
        compiler(*names).compile(StructuredParams(**params, field="guided_regex"))
    assert e.value.param == "guided_regex" and str(e.value).startswith("guided_regex: ")


@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
def test_a_wrong_grammar_is_refused(name):
    with pytest.raises(BadRequest, match="grammar: "):
        compiler(name).compile(StructuredParams(grammar="root ::= missing ) |"))


class Slow(DFABackend):
    num_compiled = 0
    gate = threading.Event()

    def translate(self, params):
        type(self).num_compiled += 1
        assert self.gate.wait(10)
        return super().translate(params)


def test_equal_specifications_are_compiled_once_however_many_ask():
    Slow.num_compiled, Slow.gate = 0, threading.Event()
    make = GrammarCompiler(vocabulary, [("slow", Slow)])
    found = []
    ask = [
        threading.Thread(target=lambda i=i: found.append(make.compile(StructuredParams(regex="a", field=f"f{i}"))))
        for i in range(5)
    ]
    for thread in ask:
        thread.start()
    Slow.gate.set()
    for thread in ask:
        thread.join()
    assert len(found) == 5 and len(set(map(id, found))) == 1 and Slow.num_compiled == 1


def test_a_failure_is_not_kept_and_the_least_recently_used_goes(monkeypatch):
    Slow.num_compiled = 0
    Slow.gate.set()
    monkeypatch.setattr("minivllm.structured.compiler.MAX_GRAMMARS", 2)
    make = GrammarCompiler(vocabulary, [("slow", Slow)])
    for _ in range(2):
        with pytest.raises(BadRequest):
            make.compile(StructuredParams(regex="("))
    assert Slow.num_compiled == 2
    for pattern in "abacab":
        make.compile(StructuredParams(regex=pattern))
    assert Slow.num_compiled == 2 + len("ab") + len("c") + len("b")


def patterns(number):
    """64 properties that XGrammar makes 36 MiB of, however small the vocabulary."""
    one = f"^([a-f]{{1,40}}|x{number}[g-z]{{1,40}}){{1,20}}$"
    texts = {f"p{i}": {"type": "string", "pattern": one.replace("x", f"x{i}_")} for i in range(64)}
    return {"type": "object", "properties": texts, "required": list(texts)}


def test_what_becomes_too_large_goes_to_the_next_backend_or_is_refused_by_its_size():
    params = StructuredParams(json=json.dumps(patterns(0)))
    with pytest.raises(BadRequest, match=r"it becomes 3\d MiB, and 32 is the most"):
        compiler("xgrammar").compile(params)
    assert compiler("xgrammar", "llguidance").choose(params)[0] == "llguidance"


def test_kept_grammars_are_as_large_together_as_they_may_be(monkeypatch):
    sizes = {}

    class Sized:
        requires = None

        def __init__(self, vocabulary): ...
        def translate(self, params):
            return b""

        def build(self, params, source):
            compiled = SimpleNamespace(num_bytes=sizes.get(params.regex, 1))
            made.append(params.regex)
            return compiled

    made, make = [], GrammarCompiler(vocabulary, [("sized", Sized)])
    monkeypatch.setattr("minivllm.structured.compiler.MAX_BYTES", 10)
    sizes |= {"large": 9, "huge": 50}
    for pattern in ("a", "b", "large", "a", "b", "huge", "huge", "a"):
        make.compile(StructuredParams(regex=pattern))
    assert made == ["a", "b", "large", "a", "b", "huge", "a"]  # what is larger than all may be stays while it is newest


def test_one_compiler_a_vocabulary_while_anybody_holds_it():
    first = shared_compiler("x", lambda: GrammarCompiler(vocabulary, []))
    assert shared_compiler("x", lambda: GrammarCompiler(vocabulary, [])) is first
    assert shared_compiler("y", lambda: GrammarCompiler(vocabulary, [])) is not first


def test_a_trie_walks_all_tokens_as_one_by_one_does():
    rng = np.random.default_rng(0)
    tokens = [bytes(rng.integers(97, 100, rng.integers(0, 6)).astype(np.uint8)) for _ in range(200)]
    table = rng.integers(0, 7, (7, 3)).astype(np.int32)
    classes = np.arange(256, dtype=np.uint8) % 3
    trie = TokenTrie(tokens)
    for state in range(7):
        after = dict(zip(trie.token_ids.tolist(), trie.walk(table, classes, state).tolist(), strict=True))
        for i, token in enumerate(tokens):
            at = state
            for byte in token:
                at = table[at, classes[byte]]
            assert after.get(i, state) == at


def test_special_tokens_and_missing_ids_are_no_text():
    from tiny_tokenizers import byte_fallback, word_piece

    tokenizer = byte_fallback()
    made = make_vocabulary(tokenizer, tokenizer.vocab_size + 3)
    assert not any(made.tokens[i] for i in (*tokenizer.special_ids, *range(tokenizer.vocab_size, len(made))))
    assert made.tokens[tokenizer.encode("z", add_special_tokens=False)[-1]] == b"z"
    with pytest.raises(BadRequest, match="fixed bytes"):
        make_vocabulary(word_piece(), 12)
