"""The dynamic k: much where drafts are good and tokens cheap, nothing where they cost more than they give."""

import numpy as np

from minivllm.spec_decode.throttle import LONGEST_PAUSE, NUM_TRUST, Throttle

FLAT = {1: 1.0, 9: 1.1, 65: 1.2}  # a forward that hardly notices its tokens
LINEAR = {1: 1.0, 9: 9.0, 65: 65.0}
START = np.linspace(0.5, 0.9, NUM_TRUST) * 2  # what a class is believed to get right of two, before anything is known


def throttle(seconds, rate=None, num_rows=64) -> Throttle:
    made = Throttle(num_rows)
    made.calibrate(seconds)
    for row in range(num_rows):
        made.reset(row)
        for _ in range(30 if rate is not None else 0):
            made.learn(row, 0, 8, round(8 * rate))
    return made


def test_without_times_every_draft_is_taken():
    assert Throttle(4).cut([0, 1], [0, 3], [4, 2], 2) == [4, 2]


def test_good_drafts_are_taken_whole_where_tokens_are_cheap():
    assert throttle(FLAT, rate=1.0).cut([0], [0], [8], 1) == [8]


def test_nothing_is_drafted_where_each_token_costs_a_step():
    for rate in (0.2, 0.9):
        assert throttle(LINEAR, rate=rate).cut([0, 1], [0, 0], [8, 8], 2) == [0, 0]


def test_bad_drafts_are_dropped_but_for_rare_probes():
    made = throttle(FLAT, rate=0.0)
    counts = []
    for _ in range(1000):
        counts += made.cut([0], [0], [8], 1)
        if counts[-1]:
            made.learn(0, 0, counts[-1], 0)
    assert set(counts) == {0, 1} and 1000 // LONGEST_PAUSE - 1 <= sum(counts) <= 1000 // LONGEST_PAUSE + 4


def test_a_probe_that_succeeds_brings_drafting_back():
    made = throttle(FLAT, rate=0.0)
    steps = 0
    while (count := made.cut([0], [0], [8], 1)[0]) < 8:
        steps += 1
        if count:
            made.learn(0, 0, count, count)
        assert steps < 2 * LONGEST_PAUSE


def test_each_class_of_evidence_has_its_own_rate():
    made = throttle(FLAT, rate=0.0)
    assert made.cut([0, 1], [0, NUM_TRUST - 1], [8, 8], 2) == [0, 8]


def test_the_best_of_a_batch_are_taken_first():
    made = throttle({1: 1.0, 2: 1.0, 4: 1.2, 8: 2.4, 65: 20.0})
    for row, rate in ((0, 1.0), (1, 0.1)):
        for _ in range(30):
            made.learn(row, 0, 4, round(4 * rate))
    good, bad = made.cut([0, 1], [0, 0], [4, 4], 2)
    assert good > bad


def test_a_new_request_starts_from_what_was_seen():
    made = throttle(FLAT, rate=0.0)
    made.reset(5)
    assert made.cut([5], [0], [8], 1) == [0]


def test_the_cut_is_the_best_of_all_prefixes():
    """Against a search over every number of drafts."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        seconds = dict(zip((1, 5, 17, 65), np.sort(rng.uniform(1, 6, 4)).tolist(), strict=True))
        made = Throttle(4)
        made.calibrate(seconds)
        for row in range(4):
            made.reset(row)
            made.accepted[row, 0], made.tried[row, 0] = rng.uniform(0, 2), 2.0
        counts = made.cut(range(4), [0] * 4, [5] * 4, 4)

        def speed(counts, made=made):
            rates = made.accepted[:, 0] / made.tried[:, 0]
            gained = 4 + sum(rates[i] ** j for i in range(4) for j in range(1, counts[i] + 1))
            return gained / float(made.seconds(np.array(4 + sum(counts))))

        everything = [(a, b, c, d) for a in range(6) for b in range(6) for c in range(6) for d in range(6)]
        best = max(map(speed, everything))
        assert speed(counts) >= best / 1.0301, "what is left is below the margin of WORTH"


def test_useless_drafts_cost_less_than_five_percent():
    """SmolLM2's step times on a CPU (milliseconds); a proposer that always guesses, on any evidence, and is never
    right. What is learned from one request helps the next, so the first one pays most."""
    seconds = {1: 12.5, 2: 13.3, 5: 13.6, 9: 14.5, 17: 18.0}
    made = Throttle(1)
    made.calibrate(seconds)
    for num_steps in (100, 200):
        made.reset(0)
        spent = 0.0
        for step in range(num_steps):
            trust = step % NUM_TRUST
            (count,) = made.cut([0], [trust], [8], 1)
            spent += float(made.seconds(np.array(1 + count)))
            if count:
                made.learn(0, trust, count, 0)
        assert spent < 1.05 * num_steps * 12.5


def test_what_was_learned_fades():
    made = Throttle(2)
    made.reset(1)
    assert made.tried[1].tolist() == [2.0] * NUM_TRUST
    np.testing.assert_allclose(made.accepted[1], np.linspace(1.0, 1.8, NUM_TRUST))
    made.learn(1, 2, 5, 3)  # the fourth was refused, the fifth never tried
    assert made.tried[1, 2] == 0.8 * 2 + 4 and made.accepted[1, 2] == 0.8 * START[2] + 3
    assert made.all_tried[2] == 0.98 * 2 + 4 and made.all_accepted[2] == 0.98 * START[2] + 3
    made.learn(1, 0, 2, 2)
    assert made.tried[1, 0] == 0.8 * 2 + 2, "all right: nothing was refused"


def test_pauses_grow_while_probes_fail():
    made = throttle(LINEAR, rate=0.0, num_rows=1)
    made.reset(0)
    probed = []
    for step in range(1, 80):
        if made.cut([0], [0], [3], 1) == [1]:
            probed.append(step)
            made.learn(0, 0, 1, 0)
    assert probed == [4, 12, 28, 60], "every 4, 8, 16, 32 steps"
    made.learn(0, 0, 1, 1)
    assert made.pause[0, 0] == 4


def test_whoever_drafts_starts_its_pause_anew():
    made = throttle(FLAT, rate=1.0, num_rows=1)
    made.skipped[0, 0] = 3
    assert made.cut([0], [0], [8], 1) == [8] and made.skipped[0, 0] == 0


def test_a_gain_is_taken_from_three_percent_on():
    for times, expected in (({1: 1.0, 2: 1.94}, [1]), ({1: 1.0, 2: 1.945}, [0]), ({1: 10.0, 2: 19.4}, [1])):
        made = throttle(times, rate=1.0, num_rows=1)
        made.accepted[0], made.tried[0] = 1.0, 1.0  # every draft is right
        assert made.cut([0], [0], [1], 1) == expected


def test_who_has_fewer_drafts_is_not_expected_to_have_more():
    """A step has room for six tokens. The likely fourth draft of one goes before the unlikely first of the other."""
    made = throttle({6: 1.0, 7: 9.0}, num_rows=2)
    made.accepted[:, 0], made.tried[:, 0] = [0.9, 0.5], 1.0
    assert made.cut([0, 1], [0, 0], [3, 1], 2) == [3, 1]
    assert made.cut([0, 1], [0, 0], [1, 3], 2) == [1, 3]
    assert made.cut([0, 1], [0, 0], [4, 4], 2) == [4, 0]
