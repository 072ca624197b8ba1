"""gRPC beside HTTP: generate.proto's service over the same application, so with its keys, limits, metrics and traces.

A call's requests live exactly as long as the call: a client that cancels, or whose connection breaks, frees them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from minivllm.serve import completions, errors
from minivllm.serve.deadline import Deadline
from minivllm.serve.generation import Job, Service
from minivllm.serve.guard import WRONG_KEY
from minivllm.serve.keys import ADMITS
from minivllm.serve.off_loop import by_size
from minivllm.serve.rate_limit import name_of
from minivllm.serve.rpc import translate
from minivllm.serve.rpc.schema import SERVICE, message
from minivllm.serve.telemetry import CONTEXT_HEADERS

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.datastructures import State

T = TypeVar("T")

STOP_SECONDS = 1.0  # for calls to say that the server ends
HEALTH_SECONDS = 0.5  # how often it is looked how the engine is
QUANTISED = {  # of HTTP's statuses
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    413: "RESOURCE_EXHAUSTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}

logger = logging.getLogger("minivllm.serve")


class GrpcServer:
    """`running()` serves as long as its context is open. `port` is the one that it got."""

    def __init__(self, app: Starlette, host: str, port: int, is_shared: bool = False, **tls: Path):
        """port: 0 for any free one. is_shared: other processes serve on it too. tls: as serve/server.py's."""
        self._app, self._address, self._is_shared, self._tls = app, (host, port), is_shared, tls
        self.port = port

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Raises OSError if the port is taken."""
        import grpc
        from grpc_health.v1 import health, health_pb2_grpc

        most = self._app.state.connection_limits.in_all
        options = [("grpc.so_reuseport", int(self._is_shared)), ("grpc.max_allowed_incoming_connections", most)]
        server = grpc.aio.server(options=options)
        method = grpc.unary_stream_rpc_method_handler(
            self._generate,
            request_deserializer=message("GenerateRequest").FromString,
            response_serializer=lambda told: told.SerializeToString(),
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Generate": method}),))
        told_health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(told_health, server)
        self._listen(server)
        await server.start()
        watching = asyncio.create_task(self._tell_health(told_health))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await server.stop(STOP_SECONDS)  # calls that run are told by `until`

    def _listen(self, server: Any) -> None:
        import grpc

        host, port = self._address
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls:
                chain = self._tls["ssl_certfile"].read_bytes()
                key = self._tls.get("ssl_keyfile", self._tls["ssl_certfile"]).read_bytes()
                self.port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, chain)]))
            else:
                self.port = server.add_insecure_port(address)
        except RuntimeError as error:  # gRPC's word for a port that it cannot have
            raise OSError(errno.EADDRINUSE, str(error)) from None

    async def _tell_health(self, servicer: Any) -> None:
        from grpc_health.v1.health_pb2 import HealthCheckResponse

        while True:
            engine = self._app.state.service.engine
            well = engine.is_running and not engine.stalled and not self._app.state.closing.done()
            for service in ("", SERVICE):
                status = HealthCheckResponse.SERVING if well else HealthCheckResponse.NOT_SERVING
                await servicer.set(service, status)
            await asyncio.sleep(HEALTH_SECONDS)

    async def _generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        import grpc

        try:
            async with aclosing(self._answers(request, context)) as answers:
                state = self._app.state
                async for told in until(answers, state.closing, state.deadlines.of()):
                    yield told
        except Exception as error:
            told = errors.as_api_error(error)
            if told.status == 500 and told is not error:
                logger.exception("a gRPC call failed")
            code = getattr(grpc.StatusCode, QUANTISED.get(told.status, "INTERNAL"))
            await context.abort(code, str(told), tuple(told.headers.items()))

    async def _answers(self, request: Any, context: Any) -> AsyncIterator[Any]:
        service, given = self._app.state.service, dict(context.invocation_metadata() or ())
        tenant, client = let_in(self._app.state, given, context.peer())
        job = await by_size(request.ByteSize(), lambda: prepared(request, service), client)
        job.tenant, job.client = tenant, client
        job.trace_context = {name: given[name] for name in CONTEXT_HEADERS if name in given}
        async with aclosing(job.outputs("delta" if request.stream else "final")) as outputs:
            async for prompt, output in outputs:
                yield translate.response(job, prompt, output.outputs, output.finished)


def prepared(request: Any, service: Service) -> Job:
    body = translate.completion_request(request)
    service.check_model(body.model)
    return completions.prepare(body, service)[0]


def let_in(state: State, metadata: dict[str, str], peer: str) -> tuple[str, str]:
    """The caller's tenant and client (generation.Job). Raises ApiError 401 or 429, as HTTP's guard does. state: the
    application's."""
    tenant, name, keys = "", None, state.keys
    if keys:
        scheme, _, key = metadata.get("authorization", "").partition(" ")
        key = (key if scheme.lower() == "bearer" else metadata.get("x-api-key", "")).encode()
        if (known := keys.accept(key)) is None:
            raise errors.ApiError(401, WRONG_KEY, "invalid_api_key")
        if "use" not in ADMITS[known.role]:
            raise errors.other_role("use")
        tenant, name = keys.tenant(known), known.owner
    client = name_of(name, state.proxies.client(address_of(peer), [metadata.get("x-forwarded-for", "")]))
    share = keys.share_of(client)
    state.service.limits.count_request(share)
    return tenant, share


def address_of(peer: str) -> str:
    """gRPC writes ipv4:127.0.0.1:5000 and ipv6:%5B::1%5D:5000."""
    host = peer.partition(":")[2].rpartition(":")[0]
    return host.replace("%5B", "").replace("%5D", "").strip("[]")


async def until(items: AsyncIterator[T], closing: asyncio.Future, deadline: Deadline | None) -> AsyncIterator[T]:
    """The items; ApiError 503 once the server ends, 504 once the server's own deadline has passed."""
    late = [] if deadline is None else [asyncio.ensure_future(deadline.passes())]
    try:
        while True:
            item = asyncio.ensure_future(anext(items, None))
            try:
                await asyncio.wait({item, closing, *late}, return_when=asyncio.FIRST_COMPLETED)
                if not item.done():
                    raise errors.closing() if closing.done() else deadline.error()
                if (found := item.result()) is None:
                    return
                yield found
            finally:
                item.cancel()
                await asyncio.gather(item, return_exceptions=True)
    finally:
        for each in late:
            each.cancel()
