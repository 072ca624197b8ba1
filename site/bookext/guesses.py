"""The widget mv-guesses: a text that was written with guesses, a step's tokens at a time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from bookext import replay
from bookext.frames import Frame, element, slot
from bookext.widgets import visible
from minivllm.trace import Trace


def draw(found: Trace, start: int | None) -> str:
    """A text as it came, a step's tokens at a time: what had been guessed, and what the model said of it."""
    prompt, made = replay.turns(found)
    if start is None:  # where most was right before something was not
        start = max(range(len(made)), key=lambda i: len(made[i].right) * bool(made[i].refused))
    frames = [_turn_frame(made, i) for i in range(len(made))]
    frame = frames[start]
    strip = "".join(
        slot(frame, f"g{i}", look="mv-token mv-right" * bool(turn.right)) + slot(frame, f"o{i}", look="mv-token mv-own")
        for i, turn in enumerate(made)
    )
    turn = "".join(slot(frame, name, look=f"mv-token mv-{name}") for name in ("right", "refused", "own"))
    keys = (("right", "guessed, and right"), ("refused", "guessed, and refused"), ("own", "the model's own token"))
    legend = " · ".join(f'<span class="mv-token mv-{look}">{name}</span>' for look, name in keys)
    drawn = (
        f'<p class="mv-strip"><span class="mv-prompt">{escape(prompt)}</span>{strip}</p>'
        f'<p class="mv-said">{slot(frame, "said")}</p><p class="mv-turn">{turn}</p><p>{legend}</p>'
    )
    return element("mv-guesses", drawn, frames, "the steps of the text", start=start, seconds=0.9 * len(frames))


def _turn_frame(made: Sequence[replay.Turn], at: int) -> Frame:
    turn = made[at]
    frame = {"said": f"Step {at + 1}. {_turn_told(turn)}"}
    frame |= {"right": visible(turn.right), "refused": visible(turn.refused), "own": visible(turn.own)}
    for i, other in enumerate(made):
        frame[f"g{i}"], frame[f"o{i}"] = other.right, other.own
        frame[f"g{i}@data-is"] = frame[f"o{i}@data-is"] = "now" if i == at else "later" if i > at else "past"
    return frame


def _turn_told(turn: replay.Turn) -> str:
    if not turn.right and not turn.refused:
        return "Nobody has guessed."
    if not turn.refused:
        return "All guesses are right, and the answer behind the last one is a gift."
    return "Guesses up to the first wrong one are right." if turn.right else "The first guess is wrong."
