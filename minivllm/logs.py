"""Log lines for people or for machines. Whatever owns the process calls `setup` once: the server, and an engine core
in a process of its own. As JSON each record is one object on one line:

    {"time": "2026-01-31T12:00:00.123Z", "level": "info", "logger": "minivllm", "message": ".."}

and a traceback is its "exception". A record that was given `fields` (see `event`) has them beside these.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]


class JSONFormatter(logging.Formatter):
    def __init__(self, process: str):
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": time, "level": record.levelname.lower(), "logger": record.name}
        if self.process:
            line["process"] = self.process
        line |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def setup(log_format: LogFormat, level: str = "info", process: str = "") -> None:
    """All records of at least `level`, to standard error. process: whose they are, if not the front end's."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JSONFormatter(process))
        logging.captureWarnings(True)
    else:
        whose = f"{process}: " if process else ""
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {whose}%(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def event(logger: logging.Logger, name: str, text: str, fields: dict[str, Any], level: int = logging.INFO) -> None:
    """One record that is `text` for people, and {"event": name, **fields} for machines."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", text, extra={"fields": {"event": name, **fields}})
