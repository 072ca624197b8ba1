"""The tests of chapter 2's exercise. They run a small model with random weights: no download, a few seconds."""

from __future__ import annotations

import random

import torch
from exercise import KVCache

from chapters.lab import OneRequest
from minivllm.loading.load import load_model

CAPACITY, HEADS, HEAD_SIZE = 8, 2, 4


def tokens(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, HEADS, HEAD_SIZE), torch.randn(n, HEADS, HEAD_SIZE)


def assert_holds(found: tuple[torch.Tensor, torch.Tensor], parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """What append gave back is the keys and values of these parts, one behind the other."""
    for name, got, wanted in zip(("keys", "values"), found, map(torch.cat, zip(*parts, strict=True)), strict=True):
        assert len(got) == len(wanted), f"{len(got)} {name} came back, of {len(wanted)} tokens so far"
        wrong = [i for i in range(len(wanted)) if not torch.equal(got[i], wanted[i])]
        assert not wrong, f"{name} of tokens {wrong} are not those that went in"


def test_what_goes_in_comes_out_in_order():
    cache = KVCache(CAPACITY, HEADS, HEAD_SIZE)
    parts = [tokens(n) for n in (3, 1, 1, 2)]
    for i, (k, v) in enumerate(parts, 1):
        assert_holds(cache.append(k, v), parts[:i])


def test_tokens_that_do_not_fit_are_refused_and_change_nothing():
    cache = KVCache(CAPACITY, HEADS, HEAD_SIZE)
    most, last = tokens(CAPACITY - 1), tokens(1)
    cache.append(*most)
    try:
        cache.append(*tokens(2))
    except ValueError:
        pass
    else:
        raise AssertionError("two tokens went into room for one")
    assert_holds(cache.append(*last), [most, last])


def test_nothing_is_copied():
    """A cache that copies itself for each token is quadratic again, in memory traffic."""
    cache = KVCache(CAPACITY, HEADS, HEAD_SIZE)
    first, _ = cache.append(*tokens(2))
    second, values = cache.append(*tokens(1))
    assert first.data_ptr() == second.data_ptr() == cache.keys.data_ptr(), "the keys that came back are a copy"
    assert values.data_ptr() == cache.values.data_ptr(), "the values that came back are a copy"


def test_any_split_of_a_text_gives_the_same_logits():
    model = load_model("dummy:tiny", torch.float32, "cpu").model
    text = random.Random(0).sample(range(256), 24)

    def request() -> OneRequest:
        return OneRequest(model, lambda layer: KVCache(24, layer.num_kv_heads, layer.head_size))

    whole = request().feed(text)
    for seed in range(4):
        cuts = sorted(random.Random(seed).sample(range(1, 24), 5))
        one = request()
        pieces = [one.feed(text[a:b]) for a, b in zip([0, *cuts], [*cuts, 24], strict=True)]
        assert torch.allclose(torch.cat(pieces), whole, atol=1e-4), f"cut at {cuts}"
