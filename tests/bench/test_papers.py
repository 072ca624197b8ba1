"""The verdicts on papers' claims, and each figure as small as it can be: a trace of a few requests."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCH = str(Path(__file__).parents[2] / "bench")
sys.path.insert(0, BENCH)  # only while importing: bench/attention.py would hide tests/attention

import paper_blog  # noqa: E402
import paper_figures  # noqa: E402
import paper_mooncake  # noqa: E402
import paper_plots  # noqa: E402
import paper_serving  # noqa: E402
import paper_simulated  # noqa: E402
import paper_v1  # noqa: E402
import paper_vllm_sequences  # noqa: E402
import papers  # noqa: E402
from paper_figures import Claim, Figure, Found, Settings, Unsure  # noqa: E402

from minivllm.errors import TraceError  # noqa: E402
from minivllm.plan import Delta  # noqa: E402
from minivllm.simulate.workload import TraceRequest  # noqa: E402

FIGURES = {}
for _name in paper_figures.FIGURES:
    FIGURES[_name] = paper_figures.load(_name)

sys.path.remove(BENCH)

CLAIM = Claim("12a", "rate", "vllm", "orca-max", 2.0, 4.0, "a reason")
QUICK = Settings(minutes=0.25)


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (None, "not: one of the two holds no rate"),
        (1.0, "not"),
        (1.5, "partly: less than the paper's"),
        (1.75, "reproduced"),
        (4.5, "reproduced"),
        (4.7, "partly: more than the paper's"),
    ],
)
def test_a_ratio_is_held_against_the_papers_range(ratio, said):
    assert CLAIM.verdict(ratio) == said


def test_a_claim_is_of_a_system_over_another_and_only_where_both_have_a_figure():
    rates = {"a": {"vllm": 6.0, "orca-oracle": 3.0, "orca-max": None}, "b": {"vllm": 8.0, "orca-oracle": 2.0}}
    over = [Claim("a", "", "vllm", other, 2.0, 2.0) for other in ("orca-oracle", "orca-max", "")]
    assert [row["ratio"] for row in paper_figures.judge(over, rates)] == [2.0, None, 6.0]
    (largest,) = paper_figures.judge([Claim("a b", "", "vllm", "orca-oracle", 2.0, 2.0)], rates)
    assert largest["ratio"] == 4.0
    assert paper_figures.judge([Claim("a c", "", "vllm", "", 1.0, 1.0)], rates) == []


def test_why_a_claim_is_missed_is_said_only_where_it_is():
    found = [paper_figures.judge([CLAIM], {"12a": {"vllm": x, "orca-max": 1.0}})[0]["why"] for x in (3.0, 9.0)]
    assert found == ["", "a reason"]


def test_a_figure_is_measured_again_with_each_value_of_what_its_paper_does_not_say():
    asked = []

    def measure(panel, settings):
        asked.append((panel.title, settings.host_ms))
        return Found({"vllm": 1.0 + settings.host_ms, "orca-max": 1.0})

    panels = {x: paper_simulated.Panel(x, "13b", "sharegpt", 1.0) for x in "ab"}
    claims = [Claim(x, "", "vllm", "orca-max", 1.0, 4.0) for x in "ab"]
    unsure = Unsure("host", "b", {"none": {"host_ms": 0.0}, "much": {"host_ms": 9.0}})
    figure = Figure("paper", "title", panels, measure, claims, "", unsure=[unsure])
    results = paper_figures.run(figure, Settings(host_ms=2.0), lambda text: None)
    assert asked == [("a", 2.0), ("b", 2.0), ("b", 0.0), ("b", 9.0)]
    assert [row["ratio"] for row in results["claims"]] == [3.0, 3.0]
    told = [(row["value"], row["panel"], row["ratio"], row["verdict"]) for row in results["unsure"]]
    assert told == [("none", "b", 1.0, "reproduced"), ("much", "b", 10.0, "partly: more than the paper's")]


@pytest.mark.parametrize("name", list(paper_figures.FIGURES))
def test_each_claim_and_each_doubt_is_about_panels_and_systems_of_its_figure(name):
    figure = FIGURES[name]
    for claim in figure.claims:
        for panel in claim.panel.split():
            systems = {name.partition("@")[0] for name in (claim.of, claim.over or claim.of)}  # "swap@16": and a size
            assert systems <= set(figure.panels[panel].systems)
        assert 0 <= claim.low <= claim.high > 0
    for unsure in figure.unsure:
        assert set(unsure.panels.split()) <= figure.panels.keys()
        for changes in unsure.values.values():
            assert replace(Settings(), **changes) != Settings()


@pytest.mark.parametrize(
    ("low", "high", "said", "reproduced"),
    [(1.3, math.inf, "at least 1.3", 9.0), (0.0, 1.2, "at most 1.2", 0.5), (2.0, 2.0, "2", 2.1), (1, 3, "1 to 3", 2)],
)
def test_a_claim_may_have_one_end(low, high, said, reproduced):
    claim = Claim("a", "", "vllm", "", low, high)
    assert claim.paper == said and claim.verdict(reproduced) == "reproduced"
    (row,) = paper_figures.judge([claim], {"a": {"vllm": 2.0}})
    assert json.loads(json.dumps(row, allow_nan=False))["paper"] == said


def test_contiguous_memory_for_the_longest_request_holds_seven_of_opt_13b():
    """The paper's figure 13 has 7.00 of Orca (Max), which 15,700 slots in runs of 2,048 are."""
    panel = replace(FIGURES["13"].panels["13a"], rate=8.0, systems=("orca-max",))
    assert 6 < paper_simulated.batches(panel, QUICK).values["orca-max"] <= 7


def test_a_rate_is_the_highest_within_the_limit_of_a_curve_that_rises():
    panel = replace(FIGURES["16"].panels["16b"], rate=4.0)
    found = paper_simulated.rates(panel, Settings(minutes=0.02, limit=0.05))
    assert found.values["vllm"] > found.values["orca-oracle"] > 0
    for system, points in found.curves.items():
        assert max(rate for rate, latency in points if latency <= 0.05) == found.values[system]


def test_samples_of_a_prompt_arrive_together_and_share_its_blocks():
    panel = replace(FIGURES["15"].panels["15-alpaca"], width=3)
    requests = list(paper_simulated.requests_of(panel, 1.0, QUICK))
    assert [request.group for request in requests[:4]] == [0, 0, 0, 1] and requests[0] == requests[2] != requests[3]
    found = paper_vllm_sequences.savings(FIGURES["15"].panels["15-alpaca"], replace(QUICK, minutes=0.05)).values
    assert 0 < found["2"] < found["4"] < 20


def test_chats_fill_the_context_as_often_as_is_said_and_leave_room_for_the_answer():
    panel = FIGURES["17"].panels["17"]
    for share in (0.0, 1.0):
        chats = list(paper_simulated.requests_of(panel, 400.0, replace(QUICK, long_share=share)))
        assert all(chat.num_prompt == 1024 for chat in chats) == bool(share)
        assert all(16 <= chat.num_prompt <= 1024 and 1 <= chat.num_output <= 1024 for chat in chats)


def test_orcas_buddies_give_every_full_chat_the_same_run_whatever_they_know_of_its_output():
    panel = replace(FIGURES["17"].panels["17"], rate=3.0, systems=("orca-max", "orca-pow2", "orca-oracle"))
    found = paper_simulated.batches(panel, replace(QUICK, long_share=1.0)).values
    assert len(set(found.values())) == 1


def test_a_swap_of_small_blocks_is_many_copies_and_a_recomputation_knows_no_blocks():
    found = FIGURES["19a"].measure(FIGURES["19a"].panels["19a"], Settings()).values
    assert found["swap@1"] > 2 * found["swap@4"] > 2 * found["swap@256"]
    assert found["recompute@1"] == found["recompute@256"]
    free = FIGURES["19a"].measure(FIGURES["19a"].panels["19a"], Settings(copy_us=0.0)).values
    assert free["swap@1"] == pytest.approx(free["swap@256"])


def test_blocks_that_are_longer_than_an_answer_leave_less_room():
    panel = replace(FIGURES["18b"].panels["18b-alpaca"], rate=60.0)
    found = FIGURES["18b"].measure(panel, replace(QUICK, minutes=0.1)).values
    assert found["recompute@256"] > 1.3 * found["recompute@16"]


def test_the_post_asks_everything_at_once_and_only_generate_is_given_batches(monkeypatch):
    monkeypatch.setattr(paper_blog, "NUM_REQUESTS", 12)
    paper_blog._a_minute.cache_clear()
    panel = FIGURES["blog"].panels["blog-3"]
    few, more = (paper_blog.throughput(panel, replace(QUICK, batch=batch)).values for batch in (1, 6))
    paper_blog._a_minute.cache_clear()  # they were of 12 requests
    assert more["vllm"] == few["vllm"] >= few["tgi"] == more["tgi"] > more["huggingface"] > few["huggingface"]


def test_v1_gains_by_its_host_and_by_its_decisions_apart(monkeypatch):
    """Without a host of V0's, V1's decisions are alone with V1's host to pay; with one, all else is nearly equal."""
    monkeypatch.setattr(paper_v1, "NUM_REQUESTS", 40)
    panel = FIGURES["v1"].panels["v1-8b"]
    free, slow = (paper_v1.throughput(panel, Settings(host_share=share)).values for share in (0.0, 1.0))
    assert free["V1, V0's host"] > free["V1"] == slow["V1"] > slow["V1, V0's host"] > 0.9 * slow["V0"]
    assert 0.4 < slow["V0"] / free["V0"] < 0.6  # a host that takes as long as the device


def test_a_picture_has_every_claim_with_its_verdict(tmp_path):
    values = {"systems": {"vllm": {"value": 9.0}, "orca-max": {"value": 3.0}}, "title": "", "curves": {}}
    claims = paper_figures.judge([CLAIM], {"12a": {"vllm": 9.75, "orca-max": 3.0}})
    results = {"paper": "P", "title": "T", "panels": {"12a": {**values, "paper": {"vllm": 30.0}}}, "claims": claims}
    record = {"params": {"limit": 0.5}, "results": {**results, "unsure": []}}
    paper_plots.save(paper_plots.plot(record, FIGURES["13"]), tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    assert "3.25, paper 2 to 4: reproduced" in drawn and "(paper 30)" in drawn and "<metadata" not in drawn


def test_of_a_figure_the_newest_line_is_drawn(tmp_path):
    path = tmp_path / "papers.jsonl"
    lines = [
        '{"params": {"figure": "2"}, "n": 1}',
        '{"params": {"figure": "12"}}',
        '{"params": {"figure": "2"}, "n": 2}',
    ]
    path.write_text("\n".join(lines))
    assert [record.get("n") for record in papers.newest(path, ["2", "13"])] == [2]


def test_a_gpus_rate_is_its_systems_over_its_gpus_and_within_the_objectives():
    """Of DistServe's steps as measured, whose prompts alone miss 0.25 s here: 2,000 tokens take 240 ms."""
    panel = replace(FIGURES["distserve"].panels["distserve-measured"], trace="fixed:prompt=500,output=3")
    of = {name: panel.of[name] for name in ("vllm", "distserve-1+1")}
    found = paper_serving.per_gpu(replace(panel, of=of), replace(QUICK, minutes=0.05))
    for name, points in found.curves.items():
        assert max(rate for rate, missed in points if missed <= 0.1) == found.values[name] > 0


def test_measured_steps_are_what_was_measured():
    panel = FIGURES["distserve"].panels["distserve-measured"]
    alone = paper_serving.build(panel, panel.of["vllm"], Settings())
    found = alone.run([TraceRequest(0.0, 1000, 3)]).summary()
    assert found["ttft"]["mean"] == pytest.approx((22.0522 + 0.140509 * 1000 + 8.07658e-6 * 1e6) / 1e3)
    assert found["tpot"]["mean"] == pytest.approx((23.475 + 5.92934e-4 * 1001.5 + 0.0607269) / 1e3)


# ------------------------------------------------------------------------------------------------------------- Mooncake


def conversation(monkeypatch, tmp_path, *lines: dict) -> None:
    path = tmp_path / "conversations.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(paper_mooncake, "PLACES", [tmp_path / "none", path])
    for cached in (paper_mooncake._simulate, paper_mooncake.prefills):
        cached.cache_clear()


def asked(second: float, names: str, num_output: int = 3) -> dict:
    ids = [ord(name) for name in names]
    return {"timestamp": 1000 * second, "input_length": 512 * len(ids), "output_length": num_output, "hash_ids": ids}


def test_a_requests_tbt_is_the_mean_of_its_slowest_tenth_of_gaps():
    figures = paper_mooncake.Stalls(1)
    for name in ("a", "b"):
        figures.arrived(name, TraceRequest(0.0, 5, 21))
    now = 0.0
    for number in range(21):
        now += {4: 3.0, 9: 1.0}.get(number, 0.1)
        figures.told([Delta("a", [1], "length" if number == 20 else None)], now)
    figures.told([Delta("b", [1], "length")], 31.0)
    assert list(figures.tbt) == pytest.approx([2.0, 0.0])  # of 20 gaps two; of none nothing
    assert [figures.effective(tbt) for tbt in (1.9, 2.1)] == [0.0, 0.5]  # b's first token is late


def test_a_store_finds_what_it_kept_and_no_more_than_fits(monkeypatch, tmp_path):
    conversation(monkeypatch, tmp_path, asked(0, "ab"), asked(1, "cd"), asked(2, "abx"))
    assert paper_mooncake.hit_rate(10**6) == pytest.approx(100 * 2 / 7)
    assert paper_mooncake.hit_rate(2 * 512) == 0.0


def test_mooncakes_nodes_find_what_any_of_them_computed(monkeypatch, tmp_path):
    conversation(monkeypatch, tmp_path, *(asked(9 * i, "abcd" + "efgh"[i]) for i in range(3)))
    panel = FIGURES["mooncake"].panels["mooncake-300"]
    found = FIGURES["mooncake"].measure(panel, replace(QUICK, minutes=1.0)).values
    assert found.keys() == set(panel.systems) and found["mooncake"] == 100.0
    settings = replace(Settings(), minutes=1.0)
    own, shared = (paper_mooncake.simulate(name, settings).summary() for name in ("vllm, prefix caching", "mooncake"))
    assert own["prefix_hit_rate"] == 0.0 and shared["prefix_hit_rate"] == pytest.approx(8 / 15, abs=0.01)


def test_without_mooncakes_trace_a_sentence_says_which(monkeypatch, tmp_path):
    monkeypatch.setattr(paper_mooncake, "PLACES", [tmp_path / "none"])
    with pytest.raises(TraceError, match="trace of conversations is needed"):
        paper_mooncake.conversations(1.0)
