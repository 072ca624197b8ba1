"""What each widget draws: the runs of chapters/traces as pictures with slots. frames.py says how they move."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from bookext import charts, replay
from bookext.charts import Scale, shown
from bookext.frames import Frame, element, slot
from bookext.replay import Lane, PoolState
from minivllm.trace import Trace

WIDE = 1000  # units across a lane, whatever its width on the page
ROW = 20
# What is marked as a stall: a gap of this share of the longest, and so many times as long as is usual.
STALL_OF_LONGEST, STALL_OF_USUAL = 0.5, 4

# ---------------------------------------------------------------------------------------- mv-timeline


def timeline(found: Sequence[Trace], names: Sequence[str], seconds: float, autoplay: bool) -> str:
    """Runs of the same arrivals, one lane each, on one axis of time."""
    lanes = [replay.lane(run) for run in found]
    if len({tuple(lane.arrivals) for lane in lanes}) != 1:
        raise ValueError("the lanes of a timeline must have the same requests")
    total = max(lane.ends[-1] for lane in lanes)
    ends = sorted({end for lane in lanes for end in lane.ends})
    frames = [_at_time(lanes, end, total) for end in [0.0, *ends]]
    stall = shortest_stall(lanes)
    drawn = "".join(
        _lane(frames[-1], i, lane, name, total, stall) for i, (lane, name) in enumerate(zip(lanes, names, strict=True))
    )
    has_stalls = any(lane.idle(req_id, stall) for lane in lanes for req_id in lane.arrivals)
    kinds = {"prompt": "a prompt, computed", "token": "a token", **({"stall": "a stall"} if has_stalls else {})}
    keys = "".join(f'<span><i class="mv-key" data-is="{kind}"></i> {name}</span>' for kind, name in kinds.items())
    legend = f'<p class="mv-legend" aria-hidden="true">{keys}</p>'
    return element(
        "mv-timeline",
        drawn + _axis(total) + legend,
        frames,
        "the two runs",
        start=len(frames) - 1,
        seconds=seconds,
        times=[end / total for end in [0.0, *ends]],
        autoplay=autoplay,
    )


def shortest_stall(lanes: Sequence[Lane]) -> float:
    """ms"""
    gaps = [b - a for lane in lanes for req_id in lane.arrivals for a, b in lane.gaps(req_id)]
    return max(STALL_OF_LONGEST * max(gaps), STALL_OF_USUAL * statistics.median(gaps)) if gaps else 0.0


def _at_time(lanes: Sequence[Lane], now: float, total: float) -> Frame:
    frame = {"time": f"{now / 1e3:.2f} s", "at@--at": f"{now / total:.4f}"}
    for i, lane in enumerate(lanes):
        frame[f"gap{i}"] = f"{lane.longest_gap(now):.0f} ms"
        frame |= {f"out{i}-{req_id}": str(lane.num_out(req_id, now)) for req_id in lane.arrivals}
    return frame


def _lane(frame: Frame, number: int, lane: Lane, name: str, total: float, stall: float) -> str:
    rows = "".join(
        f'<div class="mv-row"><span class="mv-name">{escape(req_id)}</span>'
        f'<svg class="mv-bars" viewBox="0 0 {WIDE} {ROW}" preserveAspectRatio="none" aria-hidden="true">'
        f"{_bars(lane, req_id, WIDE / total, stall)}</svg>{slot(frame, f'out{number}-{req_id}', look='mv-count')}</div>"
        for req_id in lane.arrivals
    )
    head = (
        f'<p class="mv-head"><strong>{escape(name)}</strong> longest wait between two tokens: '
        f'{slot(frame, f"gap{number}", "b")}<span class="mv-count">tokens</span></p>'
    )
    meaning = name.lower() if name.lower() in ("v0", "v1") else "other"
    rows += slot(frame, "at", "i", "mv-later")
    return f'<div class="mv-lane m-{meaning}">{head}<div class="mv-rows mv-area">{rows}</div></div>'


def _bars(lane: Lane, req_id: str, scale: float, shortest: float) -> str:
    """One path for each kind of bar. shortest: a gap of so many ms is a stall."""
    mine = [s for s in lane.slices if s.req_id == req_id]
    waits = _box(lane.arrivals[req_id] * scale, mine[0].begin * scale, ROW / 2 - 1, 2)
    prompt = "".join(_box(s.begin * scale, s.end * scale - 1, 1, ROW - 2) for s in mine if s.is_prompt)
    token = "".join(_box(s.begin * scale, s.end * scale - 1.5, 5, ROW - 10) for s in mine if not s.is_prompt)
    stall = "".join(_box(a * scale, b * scale, 3, ROW - 6) for a, b in lane.idle(req_id, shortest))
    kinds = (("wait", waits), ("stall", stall), ("prompt", prompt), ("token", token))
    return "".join(f'<path data-is="{kind}" d="{path}"/>' for kind, path in kinds if path)


def _box(left: float, right: float, top: float, height: float) -> str:
    width = max(right - left, 0.8)
    return f"M{left:.1f} {top:g}h{width:.1f}v{height:g}h-{width:.1f}z"


def _axis(total: float) -> str:
    step = next(s for s in (50, 100, 200, 250, 500, 1000, 2000, 5000) if total / s <= 6)
    marks = range(0, int(total) + 1, step)
    shown = "".join(f'<span style="left:{100 * mark / total:.2f}%">{mark}</span>' for mark in marks)
    return f'<div class="mv-axis" aria-hidden="true"><span class="mv-name">ms</span><div>{shown}</div></div>'


# ---------------------------------------------------------------------------------------- mv-blocks, mv-prefix

MAX_COLOURS = 6


def blocks(found: Trace, start: int | None, tag: str) -> str:
    """The pool and its block tables after each step. mv-prefix also shows the queue of free blocks."""
    text = replay.words(found)
    frames = [_pool_frame(step, state, text) for step, state in replay.pool_states(found)]
    requests = [record["request"]["id"] for record in found.records if record["type"] == "add"]
    frames = _same_slots(frames, requests)
    num_blocks = found.header["info"]["num_blocks"]
    start = _fullest(frames, num_blocks) if start is None else start
    if not 0 <= start < len(frames):
        raise ValueError(f"the run has steps 0 to {len(frames) - 1}, not {start}")
    frame = frames[start]
    cells = "".join(
        f'<div class="mv-block" data-slot="b{i}" data-is="{frame[f"b{i}@data-is"]}"><span class="mv-no">{i}</span>'
        f"{slot(frame, f'w{i}', look='mv-words')}</div>"
        for i in range(num_blocks)
    )
    tables = "".join(
        f'<div class="mv-table" data-is="r{i % MAX_COLOURS}"><span class="mv-name">{escape(req_id)}</span>'
        f"{slot(frame, f't{i}', look='mv-list')}{slot(frame, f's{i}', look='mv-status')}</div>"
        for i, req_id in enumerate(requests)
    )
    queue = f'<p class="mv-queue">free, next first: {slot(frame, "queue", look="mv-list")}</p>' * (tag == "mv-prefix")
    drawn = f'<p class="mv-said">{slot(frame, "said")}</p><div class="mv-pool">{cells}</div>{queue}{tables}'
    return element(tag, drawn, frames, "the steps of the run", start=start, seconds=0.9 * len(frames))


def _pool_frame(step: int, state: PoolState, text: dict[int, str]) -> dict[str, str]:
    frame = {"said": f"Step {step}. " + " ".join(state.said or ["Nobody joins, grows or leaves."])}
    frame["queue"] = " ".join(map(str, state.queue)) or "none"
    order = list(state.known)
    for block in [*state.queue, *state.holds]:
        owners = state.owners(block)
        unused = "kept" if state.is_reusable(block) else "free"
        colour = f"r{order.index(owners[0]) % MAX_COLOURS}" if owners else unused
        frame[f"b{block}@data-is"] = "shared" if len(owners) > 1 else colour
        held = state.holds.get(block, ()) if owners or state.is_reusable(block) else ()
        frame[f"w{block}"] = "".join(text[token] for token in held).strip() or ("empty" if owners else "")
    for i, req_id in enumerate(order):
        frame[f"t{i}"] = " → ".join(map(str, state.tables.get(req_id, ()))) or "–"
        frame[f"s{i}"] = state.status(req_id)
    return frame


def _same_slots(frames: Sequence[Frame], requests: Sequence[str]) -> list[Frame]:
    """Requests that have not arrived yet have slots too."""
    absent = {f"t{i}": "–" for i in range(len(requests))} | {f"s{i}": "has not arrived" for i in range(len(requests))}
    return [dict(sorted((absent | dict(frame)).items())) for frame in frames]


def _fullest(frames: Sequence[Frame], num_blocks: int) -> int:
    """The first step with the most blocks in use."""
    used = [sum(frame[f"b{i}@data-is"] not in ("free", "kept") for i in range(num_blocks)) for frame in frames]
    return used.index(max(used))


# ---------------------------------------------------------------------------------------- mv-tokens

STRIP_SHADES = 5


def tokens(found: Trace, start: int | None) -> str:
    """A text as it was sampled: how sure the model was of each token, and what else it might have said."""
    prompt, made = replay.choices(found)
    if start is None:  # where it was least sure
        start = min(range(len(made)), key=lambda i: made[i].candidates[0][1])
    num = 1 + max(len(choice.candidates) for choice in made)
    frames = [_token_frame(made, i, num) for i in range(len(made))]
    frame = frames[start]
    strip = "".join(
        slot(frame, f"c{i}", look=f"mv-token mv-shade{min(STRIP_SHADES - 1, int(STRIP_SHADES * choice.probability))}")
        for i, choice in enumerate(made)
    )
    bars = "".join(
        f'<div class="mv-row">{slot(frame, f"n{i}", look="mv-name")}'
        f'<span class="mv-track">{slot(frame, f"p{i}", "i", "mv-bar")}</span>'
        f"{slot(frame, f'q{i}', look='mv-count')}</div>"
        for i in range(num)
    )
    drawn = (
        f'<p class="mv-strip"><span class="mv-prompt">{escape(prompt)}</span>{strip}</p>'
        f'<p class="mv-said">{slot(frame, "said")}</p><div class="mv-candidates">{bars}</div>'
    )
    return element("mv-tokens", drawn, frames, "the tokens of the text", start=start, seconds=0.7 * len(frames))


def _token_frame(made: Sequence[replay.Choice], at: int, num: int) -> dict[str, str]:
    choice = made[at]
    frame = {"said": f"Token {at + 1}: {visible(choice.text)}, which had {choice.probability:.0%}."}
    for i, other in enumerate(made):
        frame[f"c{i}"] = other.text
        frame[f"c{i}@data-is"] = "now" if i == at else "later" if i > at else "past"
    rows = list(choice.candidates)
    if choice.text not in dict(rows):  # it was none of the likeliest
        rows.append((choice.text, choice.probability))
    for i in range(num):
        text, probability = rows[i] if i < len(rows) else ("", 0.0)
        frame[f"n{i}"], frame[f"q{i}"] = visible(text), f"{probability:.0%}" if text else ""
        frame[f"p{i}"], frame[f"p{i}@--w"] = "", f"{probability:.3f}"
        frame[f"p{i}@data-is"] = "taken" if text == choice.text else "other"
    return frame


def visible(text: str) -> str:
    """A token with its spaces and line ends marked."""
    return text.replace(" ", "␣").replace("\n", "⏎")


# ---------------------------------------------------------------------------------------- mv-roofline


class Roof(NamedTuple):
    """What a machine can do at most. In GFLOP/s and GB/s."""

    compute: float
    memory: float

    def at(self, intensity: float) -> float:
        return min(self.compute, self.memory * intensity)


class Load(NamedTuple):
    """A piece of work that was measured."""

    name: str
    intensity: float  # FLOP for each byte that is moved
    reached: float  # GFLOP/s


def roofline(roof: Roof, loads: Sequence[Load], start: int | None) -> str:
    """How fast work of a certain intensity can be at most, and how fast it was."""
    start = len(loads) - 1 if start is None else start
    frames = [_roof_frame(roof, loads, load) for load in loads]
    drawn = charts.axis_label("GFLOP/s") + charts.both(lambda width: _roof(width, roof, loads, frames[start]))
    drawn += charts.axis_label("FLOP for each byte moved", "below")
    drawn += f'<p class="mv-said">{slot(frames[start], "said")}</p>'
    places = _roof_axes(charts.WIDE, roof, loads)[0]
    times = [places.share(load.intensity) for load in loads]
    return element("mv-roofline", drawn, frames, "the measured points", start, times=times, nearest=True)


def _roof_axes(width: int, roof: Roof, loads: Sequence[Load]) -> tuple[Scale, Scale]:
    ridge = roof.compute / roof.memory
    intensities = [load.intensity for load in loads]
    low, high = min([*intensities, ridge / 4]), max([*intensities, ridge * 4])
    x = charts.scale([low, high], charts.LEFT, width - charts.RIGHT, is_log=True)
    rates = [roof.at(x.marks[0]), roof.compute * 1.3, *(load.reached for load in loads)]
    return x, charts.scale(rates, charts.HEIGHT - charts.BOTTOM, charts.TOP, is_log=True)


def _roof_frame(roof: Roof, loads: Sequence[Load], load: Load) -> dict[str, str]:
    bound = "the memory" if roof.memory * load.intensity < roof.compute else "the arithmetic"
    said = f"{load.name}: {shown(load.intensity)} FLOP for each byte. "
    said += f"The roof is at {shown(roof.at(load.intensity))} GFLOP/s, set by {bound}; "
    said += f"measured: {shown(load.reached)} GFLOP/s."
    return {"said": said} | {
        f"cursor{width}@transform": f"translate({_roof_axes(width, roof, loads)[0](load.intensity):.1f})"
        for width in (charts.WIDE, charts.NARROW)
    }


def _roof(width: int, roof: Roof, loads: Sequence[Load], frame: Frame) -> str:
    x, y = _roof_axes(width, roof, loads)
    ridge = roof.compute / roof.memory
    left, right = x.marks[0], x.marks[-1]
    parts = [charts.grid(y, width), *charts.x_marks(x.marks, x)]
    slope = f"M{x(left):.1f} {y(roof.at(left)):.1f}L{x(ridge):.1f} {y(roof.compute):.1f}H{x(right):.1f}"
    parts.append(f'<g class="m-other"><path class="roof" d="{slope}"/></g><g class="m-v1">')
    parts += [charts.dot(0, x(load.intensity), y(load.reached)) for load in loads]
    parts.append("</g>")
    parts.append(charts.cursor(width, frame))
    return charts.svg([*parts, charts.plot(width)], width, charts.HEIGHT, "The roofline of this machine", "mv-area")
