"""Rule: whatever a trace's file or a draw's parameters hold, a command says one sentence with the place, or runs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from minivllm.__main__ import main as command
from minivllm.errors import TraceError
from minivllm.simulate.traces import describe, load_trace

PLAIN = "arrival,prompt_tokens,output_tokens\n0,10,5\n0.5,20,6\n1.5,30,7\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
MOONCAKE = "".join(
    json.dumps({"timestamp": 27482 * i, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47 + i]}) + "\n"
    for i in range(3)
)
LINES = "".join(
    json.dumps({"arrival": i / 2, "prompt_tokens": 9, "output_tokens": 3, "pieces": [1, i], "piece_tokens": 4}) + "\n"
    for i in range(3)
)
FILES = [PLAIN, AZURE, MOONCAKE, LINES]
VALUES = [
    "-1e308", "1e308", "1e-320", "nan", "inf", "-inf", "NaN", "-1", "0", "1e30", "9" * 29, "9" * 400, "1_000", "٣", "",
    '"', '""', "'", ",", "\x00", "\ufeff", "\r", "null", "true", "[]", "{}", "[[" * 40, "[" * 5000, "a" * 200_000,
    "\ud800", " ",
    "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2023-13-45", "18:15", "arrival", "hash_ids", "1.5",
]  # fmt: skip
NAMED = [
    (f"{PLAIN}{'9' * 200_000},1,1\n", r"line 5: .*field"),
    (f"{PLAIN}-1e308,1,1\n", r"line 5: arrival must be a number"),
    ("arrival,arrival,prompt_tokens,output_tokens\n0,0,1,1\n", r"line 1: .*arrival.* twice"),
    ('{"arrival": 0, "prompt_tokens": ' + "[" * 9999 + "\n", r"line 1: no JSON object"),
    (f"{PLAIN}1e308,1,1\n", r"line 5: arrival must be a number"),
]


def damaged(rng: random.Random) -> bytes:
    text = rng.choice(FILES)
    for _ in range(rng.randrange(1, 4)):
        at, value = rng.randrange(len(text) + 1), rng.choice(VALUES)
        match rng.randrange(5):
            case 0:
                text = text[:at] + value + text[at:]
            case 1:
                text = text[:at] + text[at + rng.randrange(9) :]
            case 2:  # one cell, or one value of an object
                cells = text.split(",")
                cells[rng.randrange(len(cells))] = value
                text = ",".join(cells)
            case 3:
                lines = text.split("\n")
                rng.shuffle(lines)
                text = "\n".join(lines)
            case _:
                text += rng.choice(FILES)
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.randbytes(3) + data[at:]
    return data


@pytest.mark.parametrize(("text", "sentence"), NAMED)
def test_what_is_wrong_is_told_with_the_file_and_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=f"{path}.*{sentence}"):
        list(load_trace(path))


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_file_is_read_or_is_one_error(tmp_path: Path, seed: int) -> None:
    rng, path = random.Random(seed), tmp_path / "trace"
    for _ in range(150):
        path.write_bytes(damaged(rng))
        for rate in (None, rng.choice([0.5, 1e-320, 1e308])):
            try:
                found = describe(load_trace(path, rate=rate, num_requests=rng.choice([None, 2, 10**30])))
            except TraceError as error:
                assert "\n" not in str(error) and len(str(error)) < 1000
            else:
                assert 0 <= found.seconds < float("inf")


DRAWS = [
    "fixed:prompt={},output=8", "fixed:prompt=8,output={}", "sharegpt:arrivals=gamma,cv={}", "sharegpt:{}", "{}",
    "alpaca:arrivals={}", "lognormal:prompt={}", "poisson:cv={}", "conversations:rounds={}",
]  # fmt: skip
NUMBERS = ["1e308", "1e-320", "nan", "inf", "-1", "0", "9" * 30, "9" * 5000, "", "=", ",", "x", "0.01", "1e10"]


@pytest.mark.parametrize("draw", DRAWS)
def test_a_draws_odd_numbers_are_drawn_or_are_one_error(draw: str) -> None:
    for number in NUMBERS:
        for rate in (None, 1e-320, 1e308):
            try:
                found = describe(load_trace(draw.format(number), rate=rate, num_requests=5))
            except TraceError as error:
                assert "\n" not in str(error)
            else:
                assert 0 <= found.seconds < float("inf")


@pytest.mark.parametrize("name", ["simulate", "trace requests"])
@pytest.mark.parametrize("text", [text for text, _ in NAMED])
def test_the_commands_end_with_one_line(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    words = (
        ["trace", "requests", str(path)] if name == "trace requests" else ["simulate", "dummy:tiny", "--gpu", "h100"]
    )
    words += [] if name == "trace requests" else ["--trace", str(path)]
    with pytest.raises(TraceError) as caught:
        command(words)
    error = str(caught.value)
    assert str(path) in error and "Traceback" not in error and len(error.splitlines()) == 1, error
