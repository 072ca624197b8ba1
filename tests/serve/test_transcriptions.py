"""Rule: what is said in a recording is told as OpenAI's endpoints do; what is no recording is a 400, and cheap."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from models.speech import recording, save_speaking, sound

from minivllm import LLM, SamplingParams
from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.audio import RATE
from minivllm.errors import BadRequest
from minivllm.serve.forms import MOST_PARTS, parse
from minivllm.serve.recordings import pieces
from minivllm.serve.request_limits import RequestLimits
from minivllm.serve.sound_child import quietest

OPTIONS = {"model.dtype": "float32", "kv.num_blocks": 60, "executor.num_threads": 1, "debug.check": True}
UNSAID = [9, 10]
SAID = 8  # tokens of an answer
SHORT = {"max_completion_tokens": str(SAID)}


def three_seconds() -> np.ndarray:
    """Tones with a short silence in each second but the first moment of the next."""
    samples = np.concatenate([recording(seed) for seed in range(3)])
    for second in (1, 2):
        samples[second * RATE - 4_000 : second * RATE - 1_600] *= 1e-3
    return samples


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, tuple[str, dict[str, int]]]:
    """By whether the model knows several languages: where it is, and its words."""
    found = {}
    for name, several in (("english", False), ("several", True)):
        folder = tmp_path_factory.mktemp(name)
        words = save_speaking(folder, is_multilingual=several, suppress_tokens=[*UNSAID, 10_000])
        found[name] = str(folder), words
    return found


@pytest.fixture(scope="module")
def english(serving, folders):
    with serving(AsyncLLM(folders["english"][0], overrides=OPTIONS), names=("whisper",)) as url:
        yield url


@pytest.fixture(scope="module")
def several(serving, folders):
    engine = AsyncLLM(folders["several"][0], overrides=OPTIONS)
    with serving(engine, names=("whisper",), request_limits=RequestLimits(audio_seconds=5)) as url:
        yield url


def written(folder: str, start: list[int], recordings: list[np.ndarray]) -> str:
    """What the model writes behind `start` of each of them, by LLM."""
    never = dict.fromkeys(UNSAID, -100.0)
    params = SamplingParams(temperature=0.0, max_tokens=SAID, logit_bias=never)
    prompts = [{"prompt_token_ids": start, "multi_modal_data": {"audio": samples}} for samples in recordings]
    with LLM(folder, overrides={**OPTIONS, "engine.core": "inproc"}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert not {token for output in outputs for token in output.outputs[0].token_ids} & set(UNSAID)
    return "".join(output.outputs[0].text for output in outputs).strip()


def post(url: str, data: bytes | None, path: str = "transcriptions", **fields: Any) -> httpx.Response:
    files = {"x": (None, b"")} if data is None else {"file": ("a.wav", data)}
    return httpx.post(f"{url}/v1/audio/{path}", data={**SHORT, **fields}, files=files, timeout=60)


def exact(samples: np.ndarray) -> bytes:
    return sound(samples, subtype="FLOAT")


# ---------------------------------------------------------------- what is told


def test_a_recording_is_told_as_json_and_as_text(english, folders):
    folder, words = folders["english"]
    expected = written(folder, [words["<|startoftranscript|>"], words["<|notimestamps|>"]], [recording(0)])
    reply = post(english, exact(recording(0)), model="whisper")
    assert reply.json() == {"text": expected, "usage": {"type": "duration", "seconds": 1}}
    assert post(english, exact(recording(0)), language="en").json() == reply.json()
    plain = post(english, exact(recording(0)), response_format="text")
    assert plain.text == f"{expected}\n" and plain.headers["content-type"] == "text/plain; charset=utf-8"
    other = post(english, exact(recording(7))).json()["text"]
    assert other != expected


def test_a_long_one_is_cut_where_it_is_quiet_and_put_together(english, folders):
    samples, (folder, words) = three_seconds(), folders["english"]
    cut = [piece.samples for piece in pieces(exact(samples), 1, 10, "file")]
    assert len(cut) == 4 and all(len(piece) <= RATE for piece in cut)
    np.testing.assert_array_equal(np.concatenate(cut), samples)
    expected = written(folder, [words["<|startoftranscript|>"], words["<|notimestamps|>"]], cut)
    assert post(english, exact(samples)).json() == {"text": expected, "usage": {"type": "duration", "seconds": 3}}


def test_a_stream_is_in_order_and_ends_with_the_whole(english):
    whole = post(english, exact(three_seconds())).json()
    lines = [line for line in post(english, exact(three_seconds()), stream="true").text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    *deltas, done = (json.loads(line.removeprefix("data: ")) for line in lines[:-1])
    assert done == {"type": "transcript.text.done", **whole}
    assert {delta["type"] for delta in deltas} == {"transcript.text.delta"} and len(deltas) > 3
    assert "".join(delta["delta"] for delta in deltas).strip() == whole["text"]


def test_a_transcript_does_not_begin_with_what_the_file_keeps_from_its_beginning(serving, tmp_path):
    """The likeliest first token is its end: with begin_suppress_tokens the transcript goes on."""
    words = save_speaking(tmp_path, is_multilingual=False)
    prompt = [words["<|startoftranscript|>"], words["<|notimestamps|>"]]
    params = SamplingParams(temperature=0.0, max_tokens=1)
    asked = {"prompt_token_ids": prompt, "multi_modal_data": {"audio": recording(0)}}
    with LLM(str(tmp_path), overrides={**OPTIONS, "engine.core": "inproc"}) as llm:
        (first,) = llm.generate(asked, params, use_tqdm=False)[0].outputs[0].token_ids
    texts = []
    for unsaid in ([], [first], [first, 9]):
        save_speaking(tmp_path, is_multilingual=False, eos_token_id=first, begin_suppress_tokens=unsaid)
        with serving(AsyncLLM(str(tmp_path), overrides=OPTIONS), names=("whisper",)) as url:
            texts.append(post(url, exact(recording(0))).json()["text"])
    assert texts[0] == "" and all(texts[1:])


def test_languages_and_tasks_are_words_of_the_prompt(several, folders):
    folder, words = folders["several"]
    start, end = words["<|startoftranscript|>"], words["<|notimestamps|>"]
    german = written(folder, [start, words["<|de|>"], words["<|transcribe|>"], end], [recording(1)])
    assert post(several, exact(recording(1)), language="de").json()["text"] == german
    assert post(several, exact(recording(1)), language=" DE").json()["text"] == german
    english = written(folder, [start, words["<|de|>"], words["<|translate|>"], end], [recording(1)])
    other = written(folder, [start, words["<|en|>"], words["<|transcribe|>"], end], [recording(1)])
    assert len({german, english, other}) == 3
    assert post(several, exact(recording(1)), "translations", language="de").json()["text"] == english


def test_a_language_that_is_not_told_is_heard(several, folders):
    folder, words = folders["several"]
    start, end = words["<|startoftranscript|>"], words["<|notimestamps|>"]
    languages = [words[name] for name in ("<|en|>", "<|de|>", "<|haw|>")]
    params = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=languages)
    prompt = {"prompt_token_ids": [start], "multi_modal_data": {"audio": recording(1)}}
    with LLM(folder, overrides={**OPTIONS, "engine.core": "inproc"}) as llm:
        (language,) = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    expected = written(folder, [start, language, words["<|transcribe|>"], end], [recording(1)])
    assert post(several, exact(recording(1))).json()["text"] == expected


def test_a_prompt_is_what_was_said_before(several, folders):
    folder, words = folders["several"]
    with LLM(folder, overrides={**OPTIONS, "engine.core": "inproc"}) as llm:
        said = llm.tokenizer.encode(" as before", add_special_tokens=False)
    tail = [words[name] for name in ("<|startoftranscript|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>")]
    expected = written(folder, [words["<|startofprev|>"], *said, *tail], [recording(1)])
    for prompt in ("as before", " as before  "):
        assert post(several, exact(recording(1)), language="de", prompt=prompt).json()["text"] == expected
    long = post(several, exact(recording(1)), language="de", prompt="x" * 500)  # its end is what counts
    assert long.status_code == 200


def test_openais_client_reads_all_of_it(english):
    client, data = openai.OpenAI(base_url=f"{english}/v1", api_key="none"), exact(three_seconds())
    whole = client.audio.transcriptions.create(model="whisper", file=("a.wav", data), extra_body=SHORT)
    assert whole.text and whole.usage.seconds == 3
    streamed = client.audio.transcriptions.create(model="whisper", file=("a.wav", data), stream=True, extra_body=SHORT)
    events = list(streamed)
    assert events[-1].type == "transcript.text.done" and events[-1].text == whole.text
    text = client.audio.transcriptions.create(
        model="whisper", file=("a.wav", data), response_format="text", extra_body=SHORT
    )
    assert text == f"{whole.text}\n"


@pytest.mark.parametrize(
    ("format", "how"),
    [("WAV", {"subtype": "PCM_16"}), ("WAV", {"subtype": "PCM_U8"}), ("FLAC", {}), ("OGG", {}), ("MP3", {})],
)
def test_files_of_every_format_and_rate_and_of_many_channels_are_heard(english, format, how):
    samples = np.stack([recording(0, 44_100), recording(0, 44_100)], axis=1)
    found = list(pieces(sound(samples, 44_100, format, **how), 1, 2, "file"))
    assert 0.99 * RATE < sum(len(piece.samples) for piece in found) < 1.07 * RATE
    assert 0.99 < sum(piece.seconds for piece in found) < 1.07
    reply = post(english, sound(samples, 44_100, format, **how)).json()
    assert reply["text"] and reply["usage"]["seconds"] in (1, 2)  # MP3 comes in whole frames


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("data", "fields", "param", "message"),
    [
        (b"no sound", {}, "file", "no sound file that can be read (Format not recognised). Read are WAV"),
        (b"", {}, "file", "no sound file that can be read"),
        (sound(np.zeros(0, np.float32)), {}, "file", "the recording is empty"),
        (sound(np.zeros(6 * RATE, np.float32), format="FLAC"), {}, "file", "5 seconds at most in one request (--max-a"),
        (sound(np.full(900, np.nan, np.float32), subtype="FLOAT"), {}, "file", "no numbers"),
        (sound(np.zeros((9, 33), np.float32)), {}, "file", "33 channels; at most 32 are mixed"),
        (None, {}, "file", "missing required field file"),
        (None, {"file": "text"}, "file", "no sound file that can be read"),
        (exact(recording(0)), {"language": "xx"}, "language", 'language "xx" is none that this model knows. Known: de'),
        (exact(recording(0)), {"language": "notimestamps"}, "language", "is none that this model knows"),
        (exact(recording(0)), {"response_format": "srt"}, "response_format", "when words are said is not told yet"),
        (exact(recording(0)), {"response_format": "xml"}, "response_format", "Invalid enum value 'xml'"),
        (exact(recording(0)), {"timestamp_granularities[]": "word"}, "timestamp_granularities", "is not told yet"),
        (exact(recording(0)), {"include[]": "logprobs"}, "include", "log-probabilities of a transcript"),
        (exact(recording(0)), {"temperature": "1.5"}, "temperature", "Expected float <= 1.0"),
        (exact(recording(0)), {"temperature": "warm"}, "temperature", "Expected float"),
        (exact(recording(0)), {"max_completion_tokens": "0"}, "max_completion_tokens", ">= 1"),
        (exact(recording(0)), {"top_p": "0"}, "top_p", "top_p"),
    ],
)
def test_what_cannot_be_told_is_refused(several, data, fields, param, message):
    reply = post(several, data, **fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert message in error["message"] and error["param"] == param


def test_other_refusals_have_their_own_status(english, several, serving):
    assert post(english, exact(recording(0)), model="other").status_code == 404
    assert "English alone" in post(english, exact(recording(0)), "translations").json()["error"]["message"]
    assert "English alone" in post(english, exact(recording(0)), language="de").json()["error"]["message"]
    refused = post(several, exact(recording(0)), "translations", to_language="de").json()["error"]
    assert refused["param"] == "to_language"
    assert httpx.post(f"{english}/v1/audio/transcriptions", json={"file": "x"}).status_code == 415
    assert httpx.post(f"{english}/v1/audio/transcriptions", headers={"content-type": ""}).status_code == 415
    noted = post(english, exact(recording(0)), chunking_strategy="auto", unknown="x")
    assert noted.status_code == 200 and set(noted.headers["x-minivllm-ignored"].split(", ")) == {
        "chunking_strategy",
        "unknown",
    }


def test_a_model_of_text_says_that_it_reads_text(serving):
    engine = AsyncLLM("dummy:tiny", overrides={"kv.num_blocks": 20})
    with serving(engine, names=("tiny",)) as url:
        error = post(url, exact(recording(0))).json()["error"]
    assert "reads text alone; whisper-tiny.en writes down what is said" in error["message"]


def test_a_model_that_hears_says_so_to_who_sends_text(english):
    messages = [{"role": "user", "content": "x"}]
    for path, body in (("completions", {"prompt": "hi"}), ("chat/completions", {"messages": messages})):
        reply = httpx.post(f"{english}/v1/{path}", json=body, timeout=60)
        assert reply.status_code == 400 and "this model writes what it hears" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"sec-fetch-site": "same-origin", "origin": "http://a"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://a"}, 403),
        ({"origin": "http://a"}, 403),
        ({"sec-fetch-site": "cross-site", "origin": "http://page.example"}, 200),
    ],
)
def test_a_page_of_another_site_sends_no_forms(serving, folders, several, headers, status):
    """It would need no leave of its browser."""
    engine = AsyncLLM(folders["english"][0], overrides=OPTIONS)
    with serving(engine, names=("whisper",), cors_origins=("http://page.example",)) as url:
        files = {"file": ("a.wav", exact(recording(0)))}
        reply = httpx.post(f"{url}/v1/audio/transcriptions", data=SHORT, files=files, headers=headers, timeout=60)
    assert reply.status_code == status, reply.text


# ---------------------------------------------------------------- the parts


FORM_HEADER = "multipart/form-data; boundary=x"


def test_a_form_is_its_fields_and_files_byte_by_byte():
    content = bytes(range(256)) * 3 + b"\r\n--y\r\n"
    body = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\xc3\xa4 1\r\n'
    body += b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + content + b"\r\n--x--\r\n"
    assert parse(body, FORM_HEADER) == [("a", "ä 1"), ("file", content)]


@pytest.mark.parametrize(
    ("body", "header", "message"),
    [
        (b"--x\r\n\r\n", "multipart/form-data", "names no boundary"),
        (b"no form", FORM_HEADER, "the body is no form"),
        (
            b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\xff\r\n--x--\r\n',
            FORM_HEADER,
            "the body is no form",
        ),
        (b"--x\r\nContent-Disposition: form-data\r\n\r\n1\r\n--x--\r\n", FORM_HEADER, "the body is no form"),
        (
            b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n' * (MOST_PARTS + 1) + b"--x--\r\n",
            FORM_HEADER,
            f"more than {MOST_PARTS} parts",
        ),
    ],
)
def test_what_is_no_form_is_refused(body, header, message):
    with pytest.raises(BadRequest, match=message):
        parse(body, header)


def test_a_cut_is_in_the_middle_of_the_quietest_moment():
    samples = np.ones(RATE * 3, np.float32)
    samples[RATE * 3 - 8_000 : RATE * 3 - 6_000] = 0.1
    samples[: RATE * 2] = 0  # too far from the end
    assert RATE * 3 - 8_000 <= quietest(samples, RATE) <= RATE * 3 - 6_000
    assert quietest(np.ones(10, np.float32), RATE) == 10


def test_no_more_is_decoded_than_a_recording_may_be_long():
    data, read = sound(np.zeros(60 * RATE, np.float32), format="FLAC"), []
    assert len(data) < 100_000
    with pytest.raises(BadRequest, match="2 seconds at most"):
        for piece in pieces(data, 1, 2, "file"):
            read.append(len(piece.samples))
    assert sum(read) <= 2 * RATE
