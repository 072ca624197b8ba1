"""/debug/trace: what the engine did last, to be opened in ui.perfetto.dev while it serves. /debug/process: what the
server's own process holds, which is the same again whenever nobody asks for anything."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import psutil
from starlette.requests import Request
from starlette.responses import Response

from minivllm import trace_recent
from minivllm.errors import BadRequest
from minivllm.serve.connection import reply

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


class ProcessState(msgspec.Struct):
    server: int  # its number, of --api-servers
    rss_bytes: int
    open_files: int  # and connections
    threads: int
    tasks: int  # of the event loop, this request's own among them
    open_sequences: int  # asked of the engine, whose answers are not complete
    known_requests: int  # whose outputs the front end expects


async def process(request: Request) -> Response:
    service, this = request.app.state.service, psutil.Process()
    state = ProcessState(
        server=request.app.state.place.server,
        rss_bytes=this.memory_info().rss,
        open_files=this.num_fds(),
        threads=threading.active_count(),
        tasks=len(asyncio.all_tasks()),
        open_sequences=service.num_open,
        known_requests=service.engine.num_requests,
    )
    return reply(state)
