"""/debug/trace: what the engine did last, to be opened in ui.perfetto.dev while it serves."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from minivllm import trace_recent
from minivllm.errors import BadRequest

DEFAULT_STEPS = 100


async def trace(request: Request) -> Response:
    engine = request.app.state.service.engine
    most = engine.config.debug.recent_steps
    asked = request.query_params.get("steps", str(min(DEFAULT_STEPS, most)))
    if not (asked.isdecimal() and len(asked) < 10 and 1 <= int(asked) <= most):
        raise BadRequest(f"steps must be a number from 1 to {most} (debug.recent_steps), got {asked}", "steps")
    snapshot = await engine.recent_steps(int(asked), replica_of(request))
    data = await asyncio.to_thread(trace_recent.chrome, snapshot)
    name = {"content-disposition": 'attachment; filename="minivllm-trace.json"'}
    return Response(data, media_type="application/json", headers=name)


def replica_of(request: Request) -> int:
    """Which of several engine cores is asked for: ?replica=0."""
    asked, number = request.query_params.get("replica", "0"), request.app.state.service.engine.config.engine.replicas
    if not (asked.isdecimal() and len(asked) < 10 and int(asked) < number):
        raise BadRequest(f"replica must be a number from 0 to {number - 1} (engine.replicas), got {asked}", "replica")
    return int(asked)
