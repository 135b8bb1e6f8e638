"""Structured logs with the id of the request at hand; knows no log collector."""

from __future__ import annotations

import contextvars
import datetime
import json
import logging
import math
import sys
from typing import Literal, TextIO

current_request_id: contextvars.ContextVar[str] = contextvars.ContextVar("day0_request_id", default="")
"""Our own id of the call being served; empty outside calls."""

REQUEST_ID_KEY = "x-request-id"
"""Metadata key: a caller's id of its request on the way in, ours on the way out."""

# What a bare record has; whatever else it carries came through `extra`.
_RECORD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


# A caller's text must not be able to start a line of its own or to steer a terminal.
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", None) or current_request_id.get(),
        }
        for key, item in vars(record).items():
            if key not in _RECORD_FIELDS and key not in line:
                line[key] = str(item) if isinstance(item, float) and not math.isfinite(item) else item
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, default=str)


class _TextFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        ts = datetime.datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        request_id = getattr(record, "request_id", None) or current_request_id.get()
        extra = {k: v for k, v in vars(record).items() if k not in _RECORD_FIELDS and k != "request_id"}
        message = record.getMessage().translate(_VISIBLE)
        parts = [ts, f"{record.levelname:<7}", self._service, f"{record.name}:", message]
        if request_id:
            parts.append(f"request_id={request_id}")
        parts += [f"{key}={item!r}" for key, item in extra.items()]
        line = " ".join(parts)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        if record.stack_info:
            line += "\n" + record.stack_info
        return line


def configure_logging(
    service: str, format: Literal["json", "text"] = "json", level: str = "INFO", *, stream: TextIO | None = None
) -> None:
    """Sends every log record of the process to `stream` (standard error by default), one line each.

    `level` is a name of the logging module, in any case; an unknown one raises ValueError.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_JsonFormatter(service) if format == "json" else _TextFormatter(service))
    root = logging.getLogger()
    root.setLevel(level.upper())
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; further fields of a line go into `extra`."""
    return logging.getLogger(name)
