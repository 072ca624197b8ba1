"""/metrics of several servers of one engine: each writes what it counts into a folder of all, about once a second, and
whichever is asked adds up what it finds there. The file of a server that died stays, so that no sum goes down.

(prometheus_client's multiprocess mode does the same with memory-mapped files, for its own kinds of metrics only.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from minivllm.engine.metrics import Metrics, Snapshot

WRITE_SECONDS = 1.0
SUFFIX = ".metrics"

logger = logging.getLogger("minivllm.serve")


class SharedMetrics:
    def __init__(self, folder: Path, name: str, metrics: Metrics):
        """name: of this server, no other's, now or before. metrics: what it counts; shows all servers' from now on."""
        self._folder, self._path, self._metrics = folder, folder / f"{name}{SUFFIX}", metrics
        self._written, self._failed = b"", False
        metrics.others = self.others

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """The file is kept up to date."""
        writing = asyncio.create_task(self._write_on())
        try:
            yield
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            self.write()

    async def _write_on(self) -> None:
        while True:
            self.write()
            await asyncio.sleep(WRITE_SECONDS)

    def write(self) -> None:
        """On a full disk the others see what was written last; once there is room, what is then."""
        data = msgspec.msgpack.encode(self._metrics.snapshot())
        if data == self._written:
            return
        try:
            temporary = self._path.with_suffix(".new")
            temporary.write_bytes(data)
            temporary.replace(self._path)  # nobody reads half of it
        except OSError as error:
            if not self._failed:
                logger.error("%s: %s; /metrics of the other servers lacks what is new here", self._path, error.strerror)
            self._failed = True
        else:
            self._written, self._failed = data, False

    def others(self) -> Iterator[Snapshot]:
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            if path != self._path:
                yield msgspec.msgpack.decode(path.read_bytes(), type=Snapshot)
