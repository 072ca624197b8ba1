"""mv-rows: the rows of the persistent batch after each step of a recorded run, and what had to be written into them.

The run's plans go through the engine's own row table and its rebuilding input builder, whose arrays are what the model
is told. tests/book/test_widgets.py holds every state against the persistent builder's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from html import escape

import numpy as np

from bookext import replay
from bookext.frames import Frame, element, slot
from bookext.replay import count
from bookext.widgets import MAX_COLOURS, visible
from minivllm.batch import BatchKey, InputBatch, InputSizes
from minivllm.plan import StepPlan
from minivllm.runner.inputs import Rows
from minivllm.runner.inputs_rebuild import RebuildInputs
from minivllm.trace import Trace, plan_of


@dataclass
class RowState:
    """After a step."""

    owners: list[str]  # of each row; "" of one that nobody has
    tokens: dict[str, list[int]] = field(default_factory=dict)  # of each owner: those that are known
    blocks: dict[str, list[int]] = field(default_factory=dict)
    news: dict[str, int] = field(default_factory=dict)  # owner -> numbers that were written into its row in this step
    told: int = 0  # numbers in the arrays that the model was given
    said: list[str] = field(default_factory=list)

    @property
    def written(self) -> int:
        return sum(self.news.values())


def row_states(found: Trace) -> Iterator[RowState]:
    """For each step that runs the model."""
    config, info = found.header["config"], found.header["info"]
    max_rows = config["scheduler.max_num_seqs"]
    inputs = RebuildInputs(InputSizes(max_rows, info["max_model_len"], info["block_size"], info["num_blocks"]))
    rows = Rows(max_rows)
    for record in found.steps():
        plan = plan_of(record)
        said = [f"{req_id} leaves row {rows.leave(req_id)}." for req_id in plan.leaves]
        joined = [rows.join(join.req_id) for join in plan.joins]
        said += [f"{join.req_id} joins in row {row}." for join, row in zip(plan.joins, joined, strict=True)]
        inputs.apply(plan, joined)
        if not plan.num_tokens:
            continue
        batch = inputs.build(plan, BatchKey(plan.total_tokens))
        sampled = [record["tokens"][batch.req_ids[i]][0] for i in batch.sample_requests]
        inputs.append(batch, batch.sample_requests, np.array(sampled, np.int64))
        owner = {row: req_id for req_id, row in rows.of.items()}
        yield RowState(
            [owner.get(row, "") for row in range(max_rows)],
            {req_id: list(inputs.sequences[req_id].token_ids) for req_id in rows.of},
            {req_id: list(inputs.sequences[req_id].blocks) for req_id in rows.of},
            _news(plan, record["tokens"]),
            sum(value.size for f in fields(InputBatch) if isinstance(value := getattr(batch, f.name), np.ndarray)),
            said,
        )


def _news(plan: StepPlan, sampled: dict[str, list[int]]) -> dict[str, int]:
    news = {req_id: len(tokens) for req_id, tokens in sampled.items()}
    for join in plan.joins:
        news[join.req_id] = news.get(join.req_id, 0) + len(join.token_ids)
    for req_id, blocks in plan.new_blocks.items():
        news[req_id] = news.get(req_id, 0) + len(blocks)
    return news


def draw(found: Trace, start: int | None) -> str:
    """The rows, and beneath them two bars: what V0 writes in a step, and what V1 does."""
    states, text = list(row_states(found)), replay.words(found)
    requests = [record["request"]["id"] for record in found.records if record["type"] == "add"]
    most = max(state.told for state in states)
    frames = [_frame(states, i, requests, text, most) for i in range(len(states))]
    start = 0 if start is None else start
    if not 0 <= start < len(frames):
        raise ValueError(f"the run has steps 0 to {len(frames) - 1}, not {start}")
    frame = frames[start]
    tables = "".join(
        f'<div class="mv-table" data-slot="r{i}" data-is="{frame[f"r{i}@data-is"]}">'
        f"{slot(frame, f'o{i}', look='mv-name')}{slot(frame, f'k{i}', look='mv-list')}"
        f"{slot(frame, f'n{i}', look='mv-status')}</div>"
        for i in range(len(states[0].owners))
    )
    bars = "".join(
        f'<div class="mv-row m-{meaning}"><span class="mv-name">{escape(name)}</span>'
        f'<span class="mv-track">{slot(frame, f"{meaning}-bar", "i", "mv-bar")}</span>'
        f"{slot(frame, meaning, look='mv-count')}</div>"
        for meaning, name in (("v0", "V0"), ("v1", "V1"))
    )
    drawn = f'<p class="mv-said">{slot(frame, "said")}</p>{tables}<p>Numbers written in this step:</p>{bars}'
    drawn += f"<p>{slot(frame, 'sum')}</p>"
    return element("mv-rows", drawn, frames, "the steps of the run", start=start, seconds=0.9 * len(frames))


def _frame(states: Sequence[RowState], at: int, requests: Sequence[str], text: dict[int, str], most: int) -> Frame:
    state = states[at]
    frame = {"said": f"Step {at}. " + " ".join(state.said or ["Nobody joins, nobody leaves."])}
    for i, owner in enumerate(state.owners):
        frame[f"r{i}@data-is"] = f"r{requests.index(owner) % MAX_COLOURS}" if owner else "free"
        frame[f"o{i}"] = f"row {i}: {owner or 'nobody'}"
        frame[f"k{i}"] = _kept(state, owner, text) if owner else "–"
        frame[f"n{i}"] = f"{state.news.get(owner, 0)} new"
    for meaning, number in (("v0", state.told), ("v1", state.written)):
        frame[meaning], frame[f"{meaning}-bar"], frame[f"{meaning}-bar@--w"] = str(number), "", f"{number / most:.3f}"
    told, written = sum(s.told for s in states[: at + 1]), sum(s.written for s in states[: at + 1])
    frame["sum"] = f"Numbers written so far: {told:,} by V0, {written:,} by V1."
    return frame


def _kept(state: RowState, owner: str, text: dict[int, str]) -> str:
    tokens, blocks = state.tokens[owner], state.blocks[owner]
    where = f"block{'s' * (len(blocks) != 1)} {' → '.join(map(str, blocks))}"
    return f"{count(tokens, 'token')}, the newest {visible(text[tokens[-1]])}; {where}"
