"""Prompts of a trace: made up, of the length that it says, equal where it says that they are."""

from minivllm.simulate.workload import FIRST_TOKEN, TraceRequest, prompt_tokens

VOCAB = 1000


def test_a_prompt_is_as_long_as_the_trace_says_whatever_its_pieces():
    for num_prompt in (1, 512, 513, 1024, 2000):
        tokens = prompt_tokens(TraceRequest(0.0, num_prompt, 1, pieces=(7, 8)), VOCAB, seed=3)
        assert len(tokens) == num_prompt and min(tokens) >= FIRST_TOKEN and max(tokens) < VOCAB


def test_requests_share_what_their_pieces_name_and_nothing_behind_it():
    first = prompt_tokens(TraceRequest(0.0, 100, 1, pieces=(7, 8), piece_tokens=40), VOCAB, seed=1)
    second = prompt_tokens(TraceRequest(1.0, 100, 9, pieces=(7, 8), piece_tokens=40), VOCAB, seed=2)
    third = prompt_tokens(TraceRequest(1.0, 100, 9, pieces=(7, 9), piece_tokens=40), VOCAB, seed=1)
    assert first[:80] == second[:80] and first[80:] != second[80:]
    assert first[:40] == third[:40] and first[40:80] != third[40:80]


def test_a_prompt_is_a_function_of_its_request_and_seed():
    request = TraceRequest(0.0, 30, 1)
    assert prompt_tokens(request, VOCAB, 4) == prompt_tokens(request, VOCAB, 4) != prompt_tokens(request, VOCAB, 5)
