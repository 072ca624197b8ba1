"""Traces: the same requests for the same source, lengths with the moments that were published, and a sentence for each
thing that is wrong with a file."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeEngine

from minivllm.cli.trace import main
from minivllm.errors import TraceError
from minivllm.simulate.lengths import LogNormal, Quantiles
from minivllm.simulate.trace_draws import DRAWS, GAPS
from minivllm.simulate.trace_files import read_trace, write_trace
from minivllm.simulate.traces import UnboundedCache, describe, load_trace
from minivllm.simulate.workload import TraceRequest, prompt_tokens

# Of the published files, which are not in the project.
PUBLISHED = [parent / "shared/data/traces" for parent in Path(__file__).parents[3:5]]

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 2500, "input_length": 700, "output_length": 9, "hash_ids": [0, 3]}
"""
PLAIN = """{"arrival": 3.5, "prompt_tokens": 10, "output_tokens": 2}
{"arrival": 4, "prompt_tokens": 100, "output_tokens": 1, "pieces": [7, 8], "piece_tokens": 32}
"""
PLAIN_CSV = """arrival,prompt_tokens,output_tokens,pieces,piece_tokens
3.5,10,2,,
4,100,1,7 8,32
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


# --- files


@pytest.mark.parametrize(
    "text, requests",
    [
        (AZURE, [TraceRequest(0.0, 374, 44), TraceRequest(pytest.approx(4.314579), 396, 109)]),
        (MOONCAKE, [TraceRequest(0.0, 1100, 5, (0, 1, 2), 512), TraceRequest(2.5, 700, 9, (0, 3), 512)]),
        (PLAIN, [TraceRequest(0.0, 10, 2), TraceRequest(0.5, 100, 1, (7, 8), 32)]),
        (PLAIN_CSV, [TraceRequest(0.0, 10, 2), TraceRequest(0.5, 100, 1, (7, 8), 32)]),
    ],
    ids=["azure", "mooncake", "plain", "plain csv"],
)
def test_a_files_first_line_says_its_form(tmp_path, text, requests):
    assert list(load_trace(written(tmp_path, text))) == requests
    assert list(load_trace(written(tmp_path, "\ufeff" + text.replace("\n", "\r\n\r\n")))) == requests


@pytest.mark.parametrize(
    "text, sentence",
    [
        (AZURE + "yesterday,1,1\n", "line 4: TIMESTAMP must be a date and time, got 'yesterday'"),
        (
            AZURE + "2023-11-16 18:15:51,0,1\n",
            "line 4: ContextTokens must be an integer from 1 to 100,000,000, got '0'",
        ),
        (AZURE + "2023-11-16 18:15:51,1\n", "line 4: 2 values, and 3 columns"),
        (AZURE + "2023-11-16 18:15:48,1,1\n", "line 4: it arrives before the line above it. Sort the file by arrival"),
        (MOONCAKE + "{}\n", "line 3: no input_length"),
        (MOONCAKE.replace("[0, 3]", "[0, 3, 4]"), "line 2: hash_ids names 3 blocks of 512 tokens, more than 700"),
        (PLAIN + '{"arrival": 5', "line 3: no JSON object (Input data was truncated)"),
        (PLAIN + "[]", "line 3: no JSON object (Expected `object`, got `array`)"),
        (PLAIN.replace('"arrival": 4', '"arrival": "soon"'), "line 2: arrival must be a number, got 'soon'"),
        (PLAIN.replace('"arrival": 4', '"arrival": true'), "line 2: arrival must be a number, got True"),
        (PLAIN.replace('"arrival": 4', '"arrival": "nan"'), "line 2: arrival must be a number, got 'nan'"),
        (PLAIN.replace("[7, 8]", '["a"]'), "line 2: pieces must be a list of integers from 0, got ['a']"),
        (PLAIN.replace("piece_tokens", "piece_token"), "no column 'piece_token'. Did you mean \"piece_tokens\"?"),
        (PLAIN_CSV.replace("7 8", "7 x"), "line 3: pieces must be a list of integers from 0, got '7 x'"),
        ("", "no request in it"),
        ("arrival,prompt_tokens,output_tokens\n", "no request in it"),
        ("a,b\n1,2\n", "line 1: no known trace has the columns 'a, b'. Known: azure (TIMESTAMP, "),
        ('{"prompt": 3}', "line 1: no known trace has the columns 'prompt'. Known: azure (TIMESTAMP, "),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence_with_the_line(tmp_path, text, sentence):
    path = written(tmp_path, text)
    with pytest.raises(TraceError) as e:
        list(load_trace(path))
    assert str(e.value).startswith(str(path)) and sentence in str(e.value) and "\n" not in str(e.value)


def test_a_file_is_read_no_further_than_it_is_asked_for(tmp_path):
    path = written(tmp_path, PLAIN + "broken\n")
    assert len(list(load_trace(path, num_requests=2))) == 2
    assert next(read_trace(path)) == TraceRequest(0.0, 10, 2)


def test_a_rate_stretches_a_files_times_and_changes_nothing_else(tmp_path):
    path = tmp_path / "trace"
    write_trace(load_trace("sharegpt", num_requests=50), path)
    plain, faster = list(load_trace(path, num_requests=20)), list(load_trace(path, rate=8.0, num_requests=20))
    assert describe(faster).rate == pytest.approx(8.0)
    factor = plain[-1].arrival / faster[-1].arrival
    assert [r.arrival for r in plain] == pytest.approx([r.arrival * factor for r in faster])
    assert [(r.num_prompt, r.num_output) for r in plain] == [(r.num_prompt, r.num_output) for r in faster]


def test_a_rate_of_what_arrives_at_once_is_refused(tmp_path):
    path = written(tmp_path, PLAIN.replace('"arrival": 4', '"arrival": 3.5'))
    with pytest.raises(TraceError, match="all 2 requests arrive at once"):
        load_trace(path, rate=1.0)


@pytest.mark.parametrize("name", DRAWS.names())
def test_what_is_written_is_read_back(tmp_path, name):
    requests = list(load_trace(name, num_requests=60, rate=3.0))
    assert write_trace(requests, tmp_path / "t.jsonl") == 60
    found = list(load_trace(tmp_path / "t.jsonl"))
    assert [r.arrival for r in found] == pytest.approx([r.arrival for r in requests], abs=1e-6)
    assert [prompt_tokens(r, 500, 1) for r in found] == [prompt_tokens(r, 500, 1) for r in requests]
    assert [r.num_output for r in found] == [r.num_output for r in requests]


# --- the published files: what their papers say of them, or what was counted in them


@pytest.mark.parametrize(
    "name, count, prompts, outputs, shared",
    [  # Splitwise (ISCA 2024) gives medians of 1,020 and 129 for chats, 1,500 and 13 for code; the rest was counted
        ("azure_2023_conversations.csv", 19_366, {"p50": 1020}, {"p50": 129}, 0.0),
        ("azure_2023_code.csv", 8_819, {"p50": 1469}, {"p50": 13}, 0.0),
        ("mooncake_conversations.jsonl", 12_031, {"mean": 12_035}, {"mean": 343}, 0.374),
    ],
)
def test_the_published_files_have_the_moments_that_are_known_of_them(name, count, prompts, outputs, shared):
    path = next((folder / name for folder in PUBLISHED if (folder / name).is_file()), None)
    if path is None:
        pytest.skip(f"no {name} here")
    found = describe(load_trace(path))
    assert found.num_requests == count and found.shared == pytest.approx(shared, abs=0.001)
    assert {key: found.prompts[key] for key in prompts} == pytest.approx(prompts, rel=1e-3)
    assert {key: found.outputs[key] for key in outputs} == pytest.approx(outputs, rel=2e-3)


# --- draws


@pytest.mark.parametrize("name", DRAWS.names())
def test_a_draw_is_a_function_of_its_seed_and_its_first_requests_of_no_number(name):
    first = list(load_trace(name, num_requests=300, seed=4))
    assert list(load_trace(name, num_requests=3000, seed=4))[:300] == first
    assert list(load_trace(name, num_requests=300, seed=5)) != first
    arrivals = [request.arrival for request in first]
    assert arrivals[0] == 0.0 and arrivals == sorted(arrivals)


@pytest.mark.parametrize("name", [name for name in DRAWS.names() if name != "chat"])
def test_a_higher_rate_brings_the_same_requests_closer_together(name):
    slow, fast = (list(load_trace(name, num_requests=100, rate=rate)) for rate in (1.0, 4.0))
    assert [r.arrival for r in slow] == pytest.approx([4 * r.arrival for r in fast])
    assert [r.num_prompt for r in slow] == [r.num_prompt for r in fast]


@pytest.mark.parametrize(
    "name, prompt, output",
    [  # Kwon et al., SOSP 2023, figure 11 and section 6.4; ours for sentences
        ("sharegpt", 161.31, 337.99),
        ("alpaca", 19.31, 58.45),
        ("translation", 341 + 28, 33),
        ("translation:prefix=80", 80 + 28, 33),
        ("fixed:prompt=64,output=8", 64, 8),
        ("lognormal:prompt=1000,output=50,output_sigma=0.5", 1000, 50),
    ],
)
def test_lengths_have_the_published_means(name, prompt, output):
    found = describe(load_trace(name, num_requests=40_000))
    assert found.prompts["mean"] == pytest.approx(prompt, rel=0.025)
    assert found.outputs["mean"] == pytest.approx(output, rel=0.025)
    assert found.rate == pytest.approx(1.0, rel=0.02)


def test_the_examples_before_a_sentence_are_everybodys():
    one, other = itertools.islice(load_trace("translation", num_requests=2), 2)
    one, other = (prompt_tokens(request, 5000, seed) for seed, request in enumerate((one, other)))
    assert one[:341] == other[:341] and one[341:350] != other[341:350]


def test_a_conversations_prompts_hold_its_earlier_rounds_and_nobody_elses():
    requests = list(load_trace("chat:rounds=6,pause=1", num_requests=120))
    by_session: dict[int, list[TraceRequest]] = {}
    for request in requests:
        by_session.setdefault(request.pieces[1], []).append(request)
    assert len(by_session) > 8 and max(map(len, by_session.values())) > 4
    for rounds in by_session.values():
        for earlier, later in itertools.pairwise(rounds):
            before = earlier.num_prompt + earlier.num_output
            assert later.num_prompt > before and later.num_prompt + later.num_output <= 8192
            assert prompt_tokens(later, 500, 1)[: earlier.num_prompt] == prompt_tokens(earlier, 500, 1)
    assert describe(load_trace("chat:pause=3", num_requests=5000, rate=5.0)).rate == pytest.approx(5.0, rel=0.08)


@pytest.mark.parametrize("arrivals, cv", [("poisson", 1.0), ("gamma", 1.0), ("gamma", 3.0), ("gamma", 0.5)])
def test_gaps_have_the_asked_variation(arrivals, cv):
    name = f"fixed:arrivals={arrivals}" + (f",cv={cv}" if arrivals == "gamma" else "")
    gaps = np.diff([request.arrival for request in load_trace(name, num_requests=40_000, rate=5.0)])
    assert gaps.mean() == pytest.approx(0.2, rel=0.05) and gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_arrivals_may_be_even_or_all_at_once():
    assert [r.arrival for r in load_trace("fixed:arrivals=constant", num_requests=4, rate=2.0)] == [0, 0.5, 1, 1.5]
    assert {r.arrival for r in load_trace("fixed:arrivals=at_once", num_requests=3000)} == {0.0}
    assert set(GAPS) == {"poisson", "gamma", "constant", "at_once"}


def test_a_clipped_lognormal_has_its_mean_and_a_table_its_quantiles():
    normals = np.random.default_rng(0).standard_normal(200_000)
    lengths = LogNormal(100.0, 1.5, 10, 500).at(normals)
    assert lengths.mean() == pytest.approx(100, rel=0.01) and lengths.min() == 10 and lengths.max() == 500
    table = Quantiles((0, 10, 20, 70, 100), 100.0)
    lengths = table.at(normals)
    assert lengths.mean() == pytest.approx(100, rel=0.01)
    quartiles = np.percentile(lengths, (25, 50, 75))
    assert quartiles == pytest.approx(np.array([10, 20, 70]) * quartiles[0] / 10, rel=0.03)


@pytest.mark.parametrize(
    "source, options, sentence",
    [
        ("sharegtp", {}, 'no trace "sharegtp": there is no such file, and no draw of that name. Did you mean "share'),
        ("alpaca:widht=3", {}, 'alpaca: no parameter "widht".'),
        ("fixed:prompt=0", {}, "fixed: prompt must be an integer from 1, got '0'"),
        ("fixed:prompt=x", {}, "fixed: prompt must be an integer from 1, got 'x'"),
        ("fixed:arrivals=posson", {}, 'fixed: arrivals=posson. Did you mean "poisson"?'),
        ("fixed:cv=2", {}, "fixed: cv=2 needs arrivals=gamma"),
        ("fixed:arrivals=at_once", {"rate": 2.0}, "fixed: all requests arrive at once, so that they have no rate"),
        ("chat:rounds=0.5", {}, "chat: rounds must be at least 1, got 0.5"),
        ("chat:longest=60", {}, "chat: prefix=64 leaves no room"),
        ("lognormal:prompt=40000", {}, "must lie between 1 and longest=32768"),
        ("alpaca", {"rate": 0.0}, "a trace's rate must be above 0 requests a second, got 0.0"),
        ("alpaca", {"rate": float("nan")}, "a trace's rate must be above 0"),
        ("alpaca", {"num_requests": 0}, "a trace must have at least 1 request, got 0"),
        ("alpaca", {"seed": -1}, "a trace's seed must be at least 0, got -1"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence_at_once(source, options, sentence):
    with pytest.raises(TraceError) as e:
        load_trace(source, **options)
    assert sentence in str(e.value) and "\n" not in str(e.value)


# --- what prompts share


def brute_force_shared(requests: list[TraceRequest]) -> int:
    """Tokens that an earlier prompt begins with too, by comparing all prompts."""
    prompts = [prompt_tokens(request, 10_000, 1000 + i) for i, request in enumerate(requests)]
    found = 0
    for i, prompt in enumerate(prompts):
        same = [
            next((k for k, (a, b) in enumerate(zip(prompt, p, strict=False)) if a != b), len(p)) for p in prompts[:i]
        ]
        found += max((min(length, len(prompt)) for length in same), default=0)
    return found


def test_the_unbounded_cache_finds_what_comparing_all_prompts_finds():
    rng = np.random.default_rng(0)
    requests = []
    for i in range(150):
        pieces = tuple(int(piece) for piece in rng.integers(0, 3, rng.integers(0, 5)))
        requests.append(TraceRequest(float(i), int(rng.integers(1, 60)), 1, pieces, 10))
    cache = UnboundedCache()
    assert sum(cache.find_and_add(request) for request in requests) == brute_force_shared(requests) > 0


def test_the_engines_prefix_cache_finds_what_mooncakes_ids_say(tmp_path):
    engine = FakeEngine(500, 2000, **{"kv.block_size": 16})
    again = MOONCAKE.replace("2500", "2").replace('"timestamp": ', '"timestamp": 900')
    cache, expected, found = UnboundedCache(), [], []
    for i, request in enumerate(load_trace(written(tmp_path, MOONCAKE + again))):
        engine.add(str(i), prompt_tokens(request, 100, i), max_tokens=1)
        expected.append(min(cache.find_and_add(request), request.num_prompt - 1) // 16 * 16)
        found.append(engine.kv.lookup(engine.scheduler.requests[str(i)]))
        engine.run()
    assert found == expected == [0, 512, 1088, 688]


# --- the command


def test_the_command_describes_a_trace_or_writes_it(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert main(["requests", "fixed:prompt=7,output=3,arrivals=constant", "--num-requests", "5", "--rate", "2"]) == 0
    said = capsys.readouterr().out
    assert "5 requests in 2.0 s, 2.00 a second" in said and "prompts  7.0   7.0  7.0  7.0" in said
    assert main(["requests", "translation", "--num-requests", "5", "--seed", "3", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 5 requests\n"
    assert json.loads(out.read_text().splitlines()[0])["pieces"] == [0]
    assert list(load_trace(out))[1].num_prompt == list(load_trace("translation", num_requests=5, seed=3))[1].num_prompt
