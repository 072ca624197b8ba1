"""vLLM's own example of its prefix cache, step by step: docs.vllm.ai, version 0.8, design/v1/prefix_caching, "Example".

Ten blocks of four tokens. The page prints the free queue after each step; ours must print the same.
"""

from minivllm.kv.manager import PagedKVManager
from minivllm.kv.prefix_hash import HashPrefix
from minivllm.request import Request, SamplingParams


def run(kv, req):
    """lookup, allocate, compute, commit. Returns the cached tokens."""
    start = kv.lookup(req) if req.id not in kv.tables else req.num_computed_tokens
    kv.allocate(req, req.num_tokens - start)
    req.num_computed_tokens = req.num_tokens
    kv.commit(req)
    kv.check()
    return start


def request(req_id, tokens):
    return Request(req_id, SamplingParams(), list(tokens), len(tokens))


def free_queue(kv):
    return list(kv.pool.free_list())


def cached(kv):
    return {block for block in range(10) if block in kv.index}


def test_the_free_queue_after_each_step_is_the_one_on_the_page():
    kv = PagedKVManager(10, 4, HashPrefix(seed="example"))
    shared = list(range(100))

    zero = request("0", shared[:15])  # time 1: three full blocks, three tokens in the fourth
    assert run(kv, zero) == 0
    assert kv.tables["0"].blocks == [0, 1, 2, 3] and cached(kv) == {0, 1, 2}
    assert free_queue(kv) == [4, 5, 6, 7, 8, 9]

    for token in (15, 16):  # time 3: the fourth block fills and a fifth is needed
        zero.token_ids.append(token)
        run(kv, zero)
    assert kv.tables["0"].blocks == [0, 1, 2, 3, 4] and cached(kv) == {0, 1, 2, 3}

    one = request("1", [*shared[:10], 900, 901, 902, 903])  # time 4: ten tokens are shared, so two whole blocks
    assert run(kv, one) == 8
    assert kv.tables["1"].blocks == [0, 1, 5, 6]
    assert free_queue(kv) == [7, 8, 9]

    kv.free(zero)  # time 5: in reverse; 0 and 1 are still in use by request 1
    assert free_queue(kv) == [7, 8, 9, 4, 3, 2]
    assert {2, 3} <= cached(kv)

    kv.free(one)  # time 6
    assert free_queue(kv) == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]

    two = request("2", [*shared[:12], *range(500, 517)])  # time 7: 29 tokens, the first 12 as in request 0
    assert run(kv, two) == 12
    assert kv.tables["2"].blocks == [0, 1, 2, 7, 8, 9, 4, 3]
    assert free_queue(kv) == [6, 5]
