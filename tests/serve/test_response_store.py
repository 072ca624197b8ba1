"""The store of responses by itself: no server, and time is what the test says."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from minivllm.errors import UserError
from minivllm.serve import operate
from minivllm.serve.command import parser
from minivllm.serve.response_shelf import behind
from minivllm.serve.response_store import (
    LONGEST_CONVERSATION,
    PART,
    Changed,
    NotKept,
    Record,
    ResponseStore,
    TooLarge,
    TooLong,
    default_path,
)

DAY = 86_400.0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "below" / "responses.sqlite"


@pytest.fixture
def opened(path):
    """A function that opens a store, as a server does when it starts."""
    stores = []

    def open_store(**limits):
        stores.append(ResponseStore(path, limits.pop("now", 0.0), **limits))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def record(id, previous=None, owner="a", size=100, **fields):
    response = msgspec.json.encode({"id": id, "status": "completed", "error": None})
    return Record(id, owner, b"[]".ljust(size - len(response)), response, previous, **fields)


def ids(store, *wanted, owner="a", now=0.0):
    return [id for id in wanted if store.get(id, owner, now) is not None]


def test_what_was_put_is_found_after_a_restart(opened):
    store = opened()
    put = record("r1", events=b"event: x\n\n")
    store.put(put, now=1.0)
    owner = store.owner("key")
    store.close()
    again = opened()
    assert again.get("r1", "a", 2.0) == put and again.num_bytes == put.size
    assert again.owner("key") == owner != again.owner("other key") and "key" not in owner and again.owner("") == ""


def test_nobody_finds_or_deletes_or_stops_what_is_anothers(opened):
    store = opened()
    store.put(record("r1", server=store.server), now=0.0)
    store.put(record("r2", previous="r1", owner="b"), now=0.0)
    assert store.get("r1", "b", 0.0) is None and not store.delete("r1", "b")
    store.stop("r1", "b", "cancelled", None, 0.0)
    assert store.get("r1", "a", 0.0).server == store.server
    with pytest.raises(NotKept):
        store.conversation("r1", "b", 10**6, 0.0)
    with pytest.raises(NotKept):
        store.conversation("r2", "b", 10**6, 0.0)


def test_a_conversation_is_read_from_its_first_response(opened):
    store = opened()
    store.put(record("r1"), now=0.0)
    store.put(record("r2", "r1"), now=0.0)
    store.put(record("r3", "r2"), now=0.0)
    store.put(record("fork", "r1"), now=0.0)
    assert [turn.id for turn in store.conversation("r3", "a", 10**6, 0.0)] == ["r1", "r2", "r3"]
    assert [turn.id for turn in store.conversation("fork", "a", 10**6, 0.0)] == ["r1", "fork"]
    with pytest.raises(TooLong, match="250 bytes"):
        store.conversation("r3", "a", 250, 0.0)
    assert store.delete("r2", "a") and not store.delete("r2", "a")
    with pytest.raises(NotKept, match="r2"):
        store.conversation("r3", "a", 10**6, 0.0)


def test_a_conversation_has_a_longest_length(opened):
    store = opened()
    store.put(record("r0"), now=0.0)
    for i in range(1, LONGEST_CONVERSATION + 1):
        store.put(record(f"r{i}", f"r{i - 1}"), now=0.0)
    last = LONGEST_CONVERSATION - 1
    assert len(store.conversation(f"r{last}", "a", 10**9, 0.0)) == LONGEST_CONVERSATION
    with pytest.raises(TooLong, match=str(LONGEST_CONVERSATION)):
        store.conversation(f"r{last + 1}", "a", 10**9, 0.0)


def test_what_is_too_old_is_not_found_and_goes_with_the_next_that_comes(opened):
    store = opened(max_age=30 * DAY)
    store.put(record("r1"), now=0.0)
    assert ids(store, "r1", now=30 * DAY) == ["r1"]
    assert ids(store, "r1", now=30 * DAY + 1) == []
    assert store.num_bytes == 100
    store.put(record("r2"), now=30 * DAY + 1)
    assert store.num_bytes == 100 and ids(store, "r1", "r2", now=0.0) == ["r2"]


def test_a_conversation_that_goes_on_is_kept_whole(opened):
    store = opened(max_age=30 * DAY)
    store.put(record("r1"), now=0.0)
    store.put(record("r2", "r1"), now=1.0)
    store.put(record("other"), now=2.0)
    store.put(record("r3", "r2"), now=20 * DAY)
    store.trim(now=40 * DAY)
    assert ids(store, "r1", "r2", "r3", "other", now=40 * DAY) == ["r1", "r2", "r3"]


def test_what_was_used_least_recently_goes_first_when_there_is_too_much(opened):
    store = opened(max_bytes=350)
    store.put(record("r1"), now=1.0)
    store.put(record("r2"), now=2.0)
    store.put(record("r3", "r1"), now=3.0)
    store.put(record("r4"), now=4.0)
    assert ids(store, "r1", "r2", "r3", "r4") == ["r1", "r3", "r4"] and store.num_bytes == 300
    store.put(record("r5"), now=5.0)
    assert ids(store, "r1", "r3", "r4", "r5") == ["r3", "r4", "r5"], "of a conversation the beginning goes first"


def test_one_that_is_larger_than_all_that_may_be_kept_is_refused(opened):
    store = opened(max_bytes=350)
    store.put(record("r1"), now=1.0)
    with pytest.raises(TooLarge):
        store.put(record("r2", size=351), now=2.0)
    assert ids(store, "r1", "r2") == ["r1"]


def test_smaller_limits_hold_from_the_start_on(opened):
    store = opened()
    for i in range(5):
        store.put(record(f"r{i}"), now=float(i))
    store.close()
    assert opened(max_bytes=200).num_bytes == 200


def test_what_is_live_is_changed_by_its_server_and_never_trimmed(opened):
    mine, other = opened(max_bytes=350), opened()
    mine.put(record("r1", server=mine.server, events=b""), now=0.0)
    for i in range(5):
        mine.put(record(f"x{i}"), now=float(i))
    mine.trim(now=99 * DAY)
    assert mine.mine() == {"r1"} and other.mine() == set()
    mine.progress("r1", b'{"status": "in_progress"}')
    other.progress("r1", b'{"status": "another\'s"}')
    assert other.get("r1", "a", 99 * DAY).response == b'{"status": "in_progress"}'
    assert not other.finish("r1", b"{}", b"", 0.0)
    assert mine.finish("r1", b'{"status": "completed"}', b"x", 99 * DAY) and mine.mine() == set()
    assert other.get("r1", "a", 99 * DAY) == Record("r1", "a", mine.get("r1", "a", 99 * DAY).items,
                                                    b'{"status": "completed"}', None, None, b"x")  # fmt: skip


@pytest.mark.parametrize("end", ["stop", "delete"])
def test_a_server_finds_out_that_another_has_stopped_its_work(opened, end):
    mine, other = opened(), opened()
    mine.put(record("r1", server=mine.server), now=0.0)
    if end == "stop":
        other.stop("r1", "a", "cancelled", None, 1.0)
        assert msgspec.json.decode(mine.get("r1", "a", 1.0).response)["status"] == "cancelled"
    else:
        assert other.delete("r1", "a")
    assert mine.mine() == set() and not mine.finish("r1", b"{}", None, 2.0)
    other.stop("r1", "a", "failed", None, 3.0)  # no longer live: as it was
    found = mine.get("r1", "a", 3.0)
    assert found is None or msgspec.json.decode(found.response)["status"] == "cancelled"


def work_and_die(path, put):
    store = ResponseStore(path, 0.0)
    store.put(record("r1", server=store.server, events=b""), now=0.0)
    put.set()
    signal.pause()


@pytest.mark.parametrize("found", ["by a new server", "by one that runs"])
def test_what_a_dead_server_worked_on_has_failed(opened, path, found):
    running = opened() if found == "by one that runs" else None
    context = multiprocessing.get_context("fork")
    put = context.Event()
    child = context.Process(target=work_and_die, args=(path, put))
    child.start()
    assert put.wait(10)
    if running is not None:
        assert running.get("r1", "a", 1.0).server is not None, "it lives"
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    store = running or opened()
    response = msgspec.json.decode(store.get("r1", "a", 1.0).response)
    assert response["status"] == "failed" and "has ended" in response["error"]["message"]
    assert [file.name for file in path.parent.glob("*-server-*")] == [f"{path.name}-server-{store.server}"]


def test_only_the_user_may_read_what_is_kept(opened, path):
    path.parent.mkdir()
    path.touch(0o644)
    store = opened()
    store.put(record("r1"), now=0.0)
    assert len(files := list(path.parent.iterdir())) == 5
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}, files


def test_a_folder_of_its_own_is_the_users_alone(opened, path):
    opened()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_what_is_deleted_is_gone_from_the_file(opened, path):
    store = opened()
    store.put(Record("r1", "a", b"the secret plan" * 1000, b"{}"), now=0.0)
    store.put(record("r2"), now=0.0)
    store.delete("r1", "a")
    store.close()
    assert b"secret plan" not in path.read_bytes() and path.stat().st_size < 60_000
    assert not path.with_name(f"{path.name}-wal").exists()


def test_another_programs_file_is_left_alone(opened, path):
    path.parent.mkdir()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()
    with pytest.raises(UserError, match="no store of responses"):
        opened()
    path.write_bytes(b"Dear diary" * 1000)
    with pytest.raises(UserError, match="not a database"):
        opened()
    assert path.read_bytes().startswith(b"Dear diary")


def test_many_servers_open_and_write_one_file_at_once(opened):
    def serve(number):
        store = opened()
        for i in range(10):
            store.put(record(f"{number}-{i}"), now=0.0)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(serve, range(6)))
    assert opened().num_bytes == 6 * 10 * 100


# ------------------------------------------------------------------------------------------------------- the options


def given(*argv):
    return parser("serve").parse_args(argv)


def test_the_file_is_where_the_user_keeps_state(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    kept = operate.open_store(given("--store-max-bytes", "5000", "--store-max-age", "0.5"))
    assert kept.where == str(tmp_path / "minivllm" / "responses.sqlite") and "5,000 bytes and 0.5 days" in kept.why
    assert (kept.store.max_bytes, kept.store.max_age) == (5000, DAY / 2)
    kept.store.close()
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_path() == Path.home() / ".local" / "state" / "minivllm" / "responses.sqlite"


def test_nothing_is_kept_where_nobody_asked_for_it_and_it_cannot_be(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    kept = operate.open_store(given())
    assert kept.store is None and str(tmp_path) in kept.why and "--store-path" in kept.why
    assert operate.open_store(given("--no-store")) == (None, "nowhere", "--no-store")
    operate.check_store(given())


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--store-path", "/dev/null/x"], "/dev/null/x: "),
        (["--store-path", "x", "--no-store"], "keeps nothing"),
        (["--store-max-bytes", "0"], "at least 1"),
        (["--store-max-age", "-1"], "above 0"),
        (["--store-max-age", "inf"], "finite"),
    ],
)
def test_options_that_cannot_be_followed_end_the_start(argv, why, capsys):
    with pytest.raises(SystemExit):
        operate.check_store(given(*argv))
    assert argv[0] in (told := capsys.readouterr().err) and why in told


# ------------------------------------------------------------------------------------- parts of what there is


@pytest.mark.parametrize("seed", range(8))
def test_who_holds_most_gives_way_and_who_has_less_than_a_part_loses_nothing(opened, seed):
    draw, most = random.Random(seed), 4_000
    store = opened(max_bytes=most)
    for i in range(120):
        owner, size = draw.choice("aaaaaabbc"), draw.choice([100, 300, 1_500])
        before = {other: held(store, other) for other in "abc"}
        try:
            store.put(record(f"r{i}", owner=owner, size=size), now=float(i))
        except TooLarge:
            assert before[owner] + size > most // 3
        for other in "abc":
            if other != owner and before[other] <= most // 3:
                assert held(store, other) == before[other], "it had no more than its part"
        assert store.num_bytes == sum(held(store, other) for other in "abc") <= most


def held(store, owner):
    with store._transaction("DEFERRED") as db:
        (found,) = db.execute("SELECT ifnull(sum(size), 0) FROM responses WHERE owner = ?", (owner,)).fetchone()
        (counted,) = db.execute("SELECT ifnull(sum(bytes), 0) FROM owners WHERE owner = ?", (owner,)).fetchone()
        assert found == counted
        return found


def test_a_flood_of_one_owner_takes_no_response_of_another(opened):
    store = opened(max_bytes=10_000)
    for i in range(5):
        store.put(record(f"a{i}", owner="a", size=500), now=float(i))
    for i in range(200):
        store.put(record(f"b{i}", owner="b", size=900), now=10.0 + i)
    assert ids(store, *(f"a{i}" for i in range(5))) == [f"a{i}" for i in range(5)]


def test_a_file_from_before_owners_had_parts_is_taken_over(opened, path):
    store = opened()
    for i, owner in enumerate("aab"):
        store.put(record(f"r{i}", owner=owner), now=0.0)
    store.close()
    with sqlite3.connect(path) as db:
        for name in ("put_own", "changed_own", "deleted_own"):
            db.execute(f"DROP TRIGGER {name}")
        db.executescript("DROP TABLE owners; DROP INDEX by_owner; PRAGMA user_version = 1;")
    db.close()
    again = opened()
    assert (held(again, "a"), held(again, "b")) == (200, 100)
    again.delete("r0", "a")
    assert held(again, "a") == 100


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 3 * PART + 7])
def test_a_response_is_read_in_parts(opened, size):
    store, response = opened(), bytes(size)
    store.put(Record("r1", "a", b"[]", response, events=response[::-1]), now=0.0)
    seen = store.seen("r1", "a", 0.0)
    assert (seen.num_response, seen.num_events) == (size, size)
    for column in ("response", "events"):
        parts = [store.part(seen, column, begin) for begin in range(0, size, PART)]
        assert b"".join(parts) == response and all(len(part) <= PART for part in parts)


def test_a_part_of_what_is_another_by_now_is_never_read(opened):
    store = opened()
    store.put(record("r1", server=store.server), now=0.0)
    live = store.seen("r1", "a", 0.0)
    store.finish("r1", b"{}", None, 0.0)
    with pytest.raises(Changed):
        store.part(live, "response", 0)
    over = store.seen("r1", "a", 0.0)
    assert store.part(over, "response", 0) == b"{}"
    store.delete("r1", "a")
    store.put(Record("r2", "b", b"[]", b"{}"), now=0.0)
    assert store.seen("r2", "b", 0.0).row == over.row, "its place is used again"
    with pytest.raises(Changed):
        store.part(over, "response", 0)


@pytest.mark.parametrize("seed", range(6))
def test_pages_are_the_items_of_a_conversation_in_either_order(opened, seed):
    draw, store, items = random.Random(seed), opened(), []
    for turn in range(draw.randint(1, 5)):
        asked = [{"id": f"i{turn}-{i}", "text": 'ä"\\ \u2028' * draw.randint(0, 3)} for i in range(draw.randint(0, 4))]
        told = [{"id": f"o{turn}-{i}"} for i in range(draw.randint(0, 3))]
        before = f"r{turn - 1}" if turn else None
        store.put(
            Record(f"r{turn}", "a", msgspec.json.encode(asked), msgspec.json.encode({"output": told}), before), 0.0
        )
        items += asked + told
        last = len(told)
    items = items[: len(items) - last]
    for is_descending in (False, True):
        wanted = items[::-1] if is_descending else items
        for limit in (1, 2, 100):
            found, after, has_more = [], None, True
            while has_more:
                page, has_more = store.page(f"r{turn}", "a", after, limit, is_descending, 10**6, 0.0)
                found += map(msgspec.json.decode, page)
                after = found[-1]["id"] if found else None
                assert len(page) <= limit
            assert found == wanted
    with pytest.raises(ValueError):
        store.page(f"r{turn}", "a", "none", 1, False, 10**6, 0.0)
    with pytest.raises(TooLong):
        store.page(f"r{turn}", "a", None, 1, False, 1, 0.0)
    with pytest.raises(NotKept):
        store.page(f"r{turn}", "b", None, 1, False, 10**6, 0.0)


@pytest.mark.parametrize("seed", range(10))
def test_what_follows_the_first_events_is_found_wherever_their_text_is_cut(seed):
    draw = random.Random(seed)
    events = [b"event: x\ndata: %s\n\n" % bytes(draw.choices(b"ab\r", k=draw.randint(0, 9))) for _ in range(12)]
    text = b"".join(events)
    cuts = sorted(draw.choices(range(len(text)), k=draw.randint(0, 40)))

    async def parts():
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            yield text[begin:end]

    async def behind_all():
        for number in range(14):
            found = [part async for part in behind(parts(), number)]
            assert b"".join(found) == b"".join(events[number:]) and all(found)

    asyncio.run(behind_all())
