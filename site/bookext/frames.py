"""A widget is a page drawn here with named slots, and frames that say what goes into each of them.

static/widgets.js does nothing but show a frame. So the first one is there without JavaScript, and what a reader sees at
step k is what Python worked out for step k.

A frame is {slot: value}. The slot `ada` is an element's text, `ada@data-is` its attribute, `ada@--w` its CSS variable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape

Frame = Mapping[str, str]


def slot(frame: Frame, name: str, tag: str = "span", look: str = "", **fixed: str) -> str:
    """The element of a slot, filled from a frame."""
    own = {key.partition("@")[2]: value for key, value in frame.items() if key.startswith(f"{name}@")}
    style = "".join(f"{key}:{value};" for key, value in own.items() if key.startswith("--"))
    attributes = {"class": look, "data-slot": name, "style": style, **fixed}
    attributes |= {key: value for key, value in own.items() if not key.startswith("--")}
    written = "".join(f' {key}="{escape(value)}"' for key, value in attributes.items() if value)
    return f"<{tag}{written}>{escape(frame.get(name, ''))}</{tag}>"


def packed(frames: Sequence[Frame]) -> dict[str, list]:
    """{"slots": names, "frames": [[value, ...], ...]}; 0 stands for what the frame before has."""
    slots = list(frames[0])
    rows = []
    before: Frame = {}
    for frame in frames:
        assert frame.keys() == frames[0].keys(), "every frame fills every slot"
        rows.append([0 if before.get(name) == frame[name] else frame[name] for name in slots])
        before = frame
    return {"slots": slots, "frames": rows}


def element(
    tag: str,
    drawn: str,
    frames: Sequence[Frame],
    label: str,
    start: int = 0,
    seconds: float = 0.0,
    times: Sequence[float] = (),
    autoplay: bool = False,
    nearest: bool = False,
) -> str:
    """A custom element that steps through frames. `drawn` shows frame `start`.

    label: what is stepped through, for those who hear it. times: of each frame, from 0 to 1; none: all equally long.
    seconds: how long playing takes; 0: it is not played. nearest: a click goes to the frame that is nearest in time,
    and not to the last one before it.
    """
    data = packed(frames) | {"label": label, "start": start, "seconds": seconds, "autoplay": autoplay}
    data["nearest"] = nearest
    data["times"] = [round(time, 4) for time in times]
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    return f'<{tag} class="widget">{drawn}<script type="application/json">{text}</script></{tag}>'
