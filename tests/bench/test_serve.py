"""Load over HTTP: times count from when a request was wanted, objectives and the knee are what they say they are."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import uvicorn
from eventually import ATTEMPTS, once_of

ROOT = Path(__file__).parent.parent.parent
BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH))  # only while importing: bench/attention.py would hide tests/attention

import goodput  # noqa: E402
import http_load  # noqa: E402
import plots  # noqa: E402
from latency import Timeline  # noqa: E402

sys.path.remove(str(BENCH))

SERVICE_SECONDS = 0.05
LINES = "a\u2028b\x0bc\x85"  # line ends to Python, and part of a text


class OneAtATime(BaseHTTPRequestHandler):
    """Two tokens, once SERVICE_SECONDS have passed; HTTPServer serves one connection after the other."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        time.sleep(SERVICE_SECONDS)
        choices = [[{"index": 0, "text": LINES, "token_ids": [1]}], [{"index": 0, "text": "", "token_ids": [2]}]]
        events = [{"choices": choice} for choice in choices]
        events.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
        events = [json.dumps(event, ensure_ascii=False).encode() for event in events]
        data = b"".join(b"data: %b\n\n" % event for event in events) + b"data: [DONE]\n\n"
        self.send_response(200)
        self.end_headers()  # HTTP/1.0: the connection's end is the body's
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def slow_server():
    server = HTTPServer(("127.0.0.1", 0), OneAtATime)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def offer(url, times):
    async def run():
        async with http_load.connected(url, None, 10) as clients:
            return await http_load.offer(clients, "/", [http_load.Wanted(t, b"{}") for t in times])

    return asyncio.run(run())


def test_a_connection_is_given_up_long_before_the_server_closes_it():
    async def idle() -> float:
        async with http_load.connected("http://127.0.0.1:9", None, 10) as clients:
            return clients.turn()._transport._pool._keepalive_expiry

    assert asyncio.run(idle()) < uvicorn.Config("").timeout_keep_alive / 2


def test_requests_are_sent_on_time_though_the_server_is_behind_and_waiting_counts(slow_server):
    def on_time() -> bool:
        answers[:] = offer(slow_server, [0.01 * i for i in range(6)])
        assert all(answer.error is None for answer in answers)
        return all(answer.late_s < 3 * SERVICE_SECONDS for answer in answers)

    answers: list[http_load.Answer] = []
    assert once_of(ATTEMPTS, on_time)  # one at a time the last would be five times SERVICE_SECONDS late, every time
    # The k-th to be served waits for all before it: a client that sent one at a time would see SERVICE_SECONDS each.
    latencies = sorted(answer.timelines[0].latency for answer in answers)
    for k, latency in enumerate(latencies, start=1):
        assert latency >= k * SERVICE_SECONDS - 0.01 * 5
    assert latencies[-1] > 4 * SERVICE_SECONDS


def test_a_client_that_is_late_counts_it_and_says_so(slow_server):
    async def run():
        async with http_load.connected(slow_server, None, 10) as clients:
            wanted = time.perf_counter() - 1.0  # a second ago: the client's loop was busy
            since.append(wanted)
            return await http_load.ask(clients.turn(), "/", http_load.Wanted(0.0, b"{}"), wanted)

    since: list[float] = []
    answer = asyncio.run(run())
    assert 1.0 <= answer.late_s < time.perf_counter() - since[0] - SERVICE_SECONDS
    assert answer.timelines[0].ttft >= 1.0 + SERVICE_SECONDS


def test_tokens_are_counted_by_their_ids_else_by_events_and_the_rest_by_usage():
    answer = http_load.Answer([Timeline(0.0, 0)])
    answer.take({"choices": [{"index": 0, "text": "", "prompt_token_ids": [1, 2]}]}, 1.0)  # an opening
    answer.take({"choices": [{"index": 0, "text": "ab", "token_ids": [5, 6]}]}, 2.0)
    answer.take({"choices": [{"index": 0, "delta": {"content": "c"}}]}, 3.0)
    answer.take({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, 4.0)
    answer.take({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 5}}, 4.0)
    answer.close()
    assert answer.timelines[0].times == [2.0, 2.0, 3.0, 3.0, 3.0] and answer.timelines[0].num_in == 2


def test_an_error_or_no_token_is_a_failure(slow_server):
    answer = http_load.Answer([Timeline(0.0, 0)])
    answer.take({"error": {"message": "the engine has stopped"}}, 1.0)
    answer.close()
    assert "the engine has stopped" in answer.error
    empty = http_load.Answer([Timeline(0.0, 0)])
    empty.close()
    assert empty.error
    assert "Connect" in offer("http://127.0.0.1:9", [0.0])[0].error


# ---------------------------------------------------------------------------------------- goodput and the knee


def answered(arrival, *times):
    return http_load.Answer([Timeline(arrival, 1, list(times), list(range(len(times))))])


def test_goodput_counts_requests_that_meet_every_objective():
    slo = goodput.parse_slo(["ttft=500ms", "tpot=0.25s"])
    assert slo == {"ttft": 0.5, "tpot": 0.25}
    answers = [
        answered(0.0, 0.5, 0.9),  # both, just
        answered(0.0, 0.6, 0.7),  # its first token is late
        answered(0.0, 0.1, 2.0),  # its tokens are slow
        http_load.Answer([Timeline(0.0, 1)], error="500"),
    ]
    found = goodput.summary(answers, slo)
    assert (found["attained"], found["failed"], found["goodput"]) == (0.25, 1, 0.5)  # of one in 2 s
    assert found["request_rate"] == 1.5 and found["output_rate"] == 3.0
    assert found["ttft_p50"] == pytest.approx(500) and {"latency_p90", "tpot_p99", "itl_max"} <= found.keys()
    assert "goodput" not in goodput.summary(answers, {})
    assert goodput.summary(answers[3:], slo)["attained"] == 0.0


@pytest.mark.parametrize("wrong", ["ttft", "ttft=500", "p99=1s", "tpot=-1ms", "ttft=ms", "ttft=0s"])
def test_what_is_no_objective_is_refused(wrong):
    with pytest.raises(ValueError, match="no objective"):
        goodput.parse_slo([wrong])


def rows(*figures):
    names = ("request_rate", "latency_p50", "attained")
    return [{"rate": rate, "runs": [dict(zip(names, row, strict=True))]} for rate, *row in figures]


def test_the_knee_is_where_rate_over_latency_is_highest():
    swept = rows((1, 1.0, 100, 1.0), (2, 2.0, 110, 1.0), (4, 3.8, 150, 0.95), (8, 5.0, 900, 0.2))
    assert goodput.knee(swept) == {"rate": 4, "inside": True, "says": "the knee is at 4 requests/s"}
    assert goodput.knee(swept[:3]) == {"rate": 4, "inside": False, "says": "no knee up to 4 requests/s"}
    assert goodput.knee(swept[2:]) == {"rate": 4, "inside": False, "says": "the knee is at 4 requests/s or below"}
    assert goodput.best_in_slo(swept, 0.9) == 4 and goodput.best_in_slo(swept, 0.99) == 2
    assert goodput.best_in_slo(swept[3:], 0.9) is None
    assert goodput.knee([{"rate": 1, "runs": [{"failed": 3}]}]) is None


# ---------------------------------------------------------------------------------------- the whole


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_sweep_over_a_server_that_it_starts_itself(tmp_path, endpoint):
    out = tmp_path / "serve.jsonl"
    options = ["--model", "dummy:tiny", "--serve", "--set kv.num_blocks=200", "--endpoint", endpoint, "--out", str(out)]
    shape = ["--rates", "40", "20", "--num-requests", "4", "--scale", "0.05", "--slo", "ttft=60s", "--warmup", "1"]
    command = [sys.executable, "bench/serve.py", *options, *shape]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    record = json.loads(line)
    assert record["bench"] == "serve" and record == plots.last_record(out)
    results = record["results"]
    assert [row["rate"] for row in results["rows"]] == [20, 40] and results["best_in_slo"] == 40
    for row in results["rows"]:
        (run,) = row["runs"]
        assert run["failed"] == 0 and not row["errors"] and run["attained"] == 1.0
        assert 0 < run["ttft_p50"] <= run["ttft_p90"] <= run["ttft_p99"] <= run["latency_p99"]
        assert run["request_rate"] > 0 and run["goodput"] == run["request_rate"] and run["late_p99"] >= 0
    assert results["knee"]["rate"] in (20, 40)
    assert out.with_suffix(".png").stat().st_size > 1000 and "dummy:tiny" in out.with_suffix(".svg").read_text()
