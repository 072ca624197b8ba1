from __future__ import annotations

import pytest
import tiny_tokenizers as tiny

from minivllm.engine.output import OutputProcessor
from minivllm.errors import BadRequest
from minivllm.plan import Delta
from minivllm.request import SamplingParams, sequence_ids

TOKENIZER = tiny.byte_level()
EOS = TOKENIZER.eos_token_ids[0]
PROMPT = [5, 6, 7]
ARRIVED = 100.0
A, B, C, D = (TOKENIZER.encode(char)[0] for char in "abcd")


def start(kind="cumulative", request_id="r", processor=None, **params) -> OutputProcessor:
    processor = processor or OutputProcessor(TOKENIZER)
    resolved = SamplingParams(seed=0, **params)
    processor.add(request_id, "prompt", PROMPT, resolved, sequence_ids(request_id, resolved.n), ARRIVED, kind)
    return processor


def step(processor, *deltas, now=101.0):
    """-> (outputs, ids to abort); a delta as (id, tokens) or (id, tokens, finish reason) or a Delta."""
    deltas = [d if isinstance(d, Delta) else Delta(*d) for d in deltas]
    for delta in deltas:
        delta.arrival_time = delta.arrival_time or ARRIVED
    result = processor.process(deltas, now)
    processor.check()
    return result


def test_cumulative_outputs_grow_and_delta_outputs_join_to_the_same():
    pushes = [([A],), ([B, C],), ([D], "length")]
    whole = [step(p, ("r", *push))[0][0] for p in [start()] for push in pushes]
    parts = [step(p, ("r", *push))[0][0] for p in [start("delta")] for push in pushes]
    assert [o.outputs[0].text for o in whole] == ["a", "abc", "abcd"]
    assert [o.outputs[0].text for o in parts] == ["a", "bc", "d"]
    assert [o.outputs[0].token_ids for o in whole] == [[A], [A, B, C], [A, B, C, D]]
    assert [o.outputs[0].token_ids for o in parts] == [[A], [B, C], [D]]
    for last in (whole[-1], parts[-1]):
        assert last.finished and last.outputs[0].finish_reason == "length" and last.outputs[0].stop_reason is None
        assert (last.request_id, last.prompt, last.prompt_token_ids) == ("r", "prompt", PROMPT)
    assert not whole[0].finished


def test_what_comes_late_is_not_taken_for_the_next_request_of_that_name():
    processor = start("delta")
    late = Delta("r", [A], "length", arrival_time=ARRIVED - 1)
    assert step(processor, late) == ([], [])
    ((output,), _) = step(processor, ("r", [B]))
    assert output.outputs[0].token_ids == [B] and not output.finished


def test_a_request_knows_when_its_first_step_began_and_how_often_it_was_preempted():
    processor = start(n=2, temperature=1)
    processor.scheduled(["r#0", "r#1", "unknown"], ARRIVED + 2)
    processor.scheduled(["r#1"], ARRIVED + 3)
    metrics = processor.metrics_of("r")
    assert (metrics.scheduled_time, metrics.num_preemptions) == (ARRIVED + 2, 1)
    other = start(request_id="s", processor=processor)
    other.scheduled(["s"], ARRIVED - 1)  # on a clock that is read a little later
    assert other.metrics_of("s").scheduled_time == ARRIVED


def test_a_final_output_comes_once():
    processor = start("final")
    assert step(processor, ("r", [A])) == ([], [])
    ((output,), _) = step(processor, ("r", [B], "length"))
    assert output.outputs[0].text == "ab" and output.finished
    assert len(processor) == 0


def test_the_stop_token_stays_in_token_ids_and_out_of_the_text():
    for include, text in ((False, "a"), (True, "ab")):
        processor = start(include_stop_str_in_output=include)
        ((output,), aborts) = step(processor, Delta("r", [A, B], "stop", B))
        assert (output.outputs[0].text, output.outputs[0].token_ids) == (text, [A, B])
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", B)
        assert aborts == []


def test_a_stop_string_ends_the_request_here_and_aborts_it_in_the_core():
    processor = start("delta", stop=["bc"])
    ((first,), aborts) = step(processor, ("r", [A, B]))
    assert (first.outputs[0].text, aborts) == ("a", [])
    ((last,), aborts) = step(processor, ("r", [C, D]))
    assert aborts == ["r"] and last.finished
    out = last.outputs[0]
    assert (out.text, out.token_ids, out.finish_reason, out.stop_reason) == ("", [C], "stop", "bc")
    assert step(processor, ("r", [D])) == ([], [])
    assert step(processor, ("r", [D], "abort")) == ([], [])


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [4], [2, 2], [3, 1]])
def test_a_stop_string_gives_the_same_output_however_many_tokens_a_step_brings(sizes):
    processor = start(stop=["bc"], logprobs=0)
    tokens, output = [A, B, C, D], None
    for size in sizes:
        now, tokens = tokens[:size], tokens[size:]
        outputs, _ = step(processor, Delta("r", now, logprobs=[[(t, -0.5, 1)] for t in now]))
        output = outputs[0] if outputs else output
    out = output.outputs[0]
    assert (out.text, out.token_ids, len(out.logprobs), out.cumulative_logprob) == ("a", [A, B, C], 3, -1.5)


def test_a_stop_string_in_the_last_step_wins_over_length_and_needs_no_abort():
    ((output,), aborts) = step(start(stop=["b"]), ("r", [A, B], "length"))
    assert aborts == [] and output.outputs[0].finish_reason == "stop" and output.outputs[0].text == "a"


def test_held_back_text_is_shown_when_the_request_ends_otherwise():
    ((output,), _) = step(start(stop=["bcd"]), ("r", [A, B, C], "length"))
    assert output.outputs[0].text == "abc"


def test_choices_of_one_request_are_merged_and_end_together():
    processor = start(n=2)
    ((first,), _) = step(processor, ("r#1", [B]), ("r#0", [A]))
    assert [(o.index, o.text) for o in first.outputs] == [(0, "a"), (1, "b")]
    ((second,), _) = step(processor, ("r#1", [C], "length"))
    assert not second.finished and [o.finish_reason for o in second.outputs] == [None, "length"]
    ((third,), _) = step(processor, ("r#0", [D], "length"))
    assert third.finished and [o.text for o in third.outputs] == ["ad", "bc"]
    assert len(processor) == 0


def test_delta_outputs_hold_only_the_choices_that_moved():
    processor = start("delta", n=3)
    ((output,), _) = step(processor, ("r#2", [B]), ("r#0", [A]))
    assert [(o.index, o.text) for o in output.outputs] == [(0, "a"), (2, "b")]


def test_a_stop_string_of_one_choice_aborts_only_that_one():
    processor = start(n=2, stop=["b"])
    ((output,), aborts) = step(processor, ("r#0", [A]), ("r#1", [B]))
    assert aborts == ["r#1"] and not output.finished
    assert processor.abort("r") == ["r#0"]


def test_logprobs_have_vllms_shape():
    processor = start(logprobs=2)
    entries = [(B, -1.0, 2), (A, -0.5, 1), (B, -1.0, 2)]
    ((output,), _) = step(processor, Delta("r", [B], logprobs=[entries]))
    (position,) = output.outputs[0].logprobs
    assert list(position) == [B, A]
    assert (position[A].logprob, position[A].rank, position[A].decoded_token) == (-0.5, 1, "a")
    assert output.outputs[0].cumulative_logprob == -1.0
    ((plain,), _) = step(start(), ("r", [A]))
    assert plain.outputs[0].logprobs is None and plain.outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
def test_prompt_logprobs_are_gathered_over_chunks_and_given_with_the_first_token(kind):
    processor = start(kind, prompt_logprobs=0)
    assert step(processor, Delta("r", [], prompt_logprobs=[[(6, -1.0, 1)]])) == ([], [])
    ((first,), _) = step(processor, Delta("r", [A], prompt_logprobs=[[(7, -2.0, 3)]], num_cached_tokens=2))
    assert first.prompt_logprobs[0] is None
    assert [list(p) for p in first.prompt_logprobs[1:]] == [[6], [7]]
    assert first.num_cached_tokens == 2
    ((second,), _) = step(processor, ("r", [B], "length"))
    assert (second.prompt_logprobs is None) == (kind == "delta")


def test_times_give_ttft_itl_tpot_and_end_to_end():
    processor = start(max_tokens=4)
    step(processor, ("r", [A]), now=101.0)
    step(processor, ("r", [B]), now=101.5)
    ((output,), _) = step(processor, ("r", [C, D], "length"), now=102.5)
    m = output.metrics
    assert (m.arrival_time, m.first_token_time, m.last_token_time, m.finished_time) == (100, 101, 102.5, 102.5)
    assert (m.ttft, m.itls, m.tpot, m.e2e, m.num_generation_tokens) == (1, [0.5, 1.0], 0.5, 2.5, 4)


def test_times_of_several_choices_are_taken_choice_by_choice():
    processor = start(n=2)
    step(processor, ("r#0", [A]), ("r#1", [A]), now=101.0)
    step(processor, ("r#0", [A]), now=102.0)
    ((output,), _) = step(processor, ("r#1", [A], "length"), now=104.0)
    assert output.metrics.itls == [1.0, 3.0] and output.metrics.tpot == 2.0


def test_an_error_ends_its_own_request_with_its_message():
    processor = start()
    start(processor=processor, request_id="other")
    outputs, aborts = step(processor, Delta("r", [], "error", error="no"), ("other", [A]))
    assert outputs[0].finished and outputs[0].error == "no" and outputs[0].outputs[0].finish_reason == "error"
    assert not outputs[1].finished and outputs[1].error is None and aborts == []


def test_an_abort_by_the_client_forgets_the_request_and_names_what_the_core_must_drop():
    processor = start(n=2)
    step(processor, ("r#0", [A], "length"))
    assert processor.abort("r") == ["r#1"]
    assert processor.abort("r") == [] == processor.abort("unknown")
    assert step(processor, ("r#1", [A])) == ([], [])
    assert len(processor) == 0


@pytest.mark.parametrize("end, reason", [("aborted", "abort"), ("failed", "error")])
def test_a_request_ended_from_outside_gets_a_last_output_and_is_still_dropped_in_the_core(end, reason):
    processor = start("delta", stop=["bx"])
    step(processor, ("r", [A, B]))
    output = processor.aborted("r") if end == "aborted" else processor.failed("r", "why", now=103.0)
    out = output.outputs[0]
    assert output.finished and (out.text, out.finish_reason) == ("b", reason)
    assert output.error == (None if end == "aborted" else "why")
    assert step(processor, ("r", [C])) == ([], [])
    assert processor.aborted("r") is None
    assert processor.abort("r") == ["r"]
    assert len(processor) == 0


def test_an_id_in_use_is_refused():
    processor = start()
    with pytest.raises(BadRequest, match='"r" is in use'):
        start(processor=processor)


def test_without_detokenising_there_are_token_ids_only():
    ((output,), _) = step(start(detokenize=False, logprobs=0), Delta("r", [A], "length", logprobs=[[(A, -1.0, 1)]]))
    out = output.outputs[0]
    assert (out.text, out.token_ids) == ("", [A])
    assert out.logprobs[0][A].decoded_token is None
