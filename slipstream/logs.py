"""JSON lines: one object per line with time, level, service, instance, run, logger, message, and fields such as draw, sample,
version or batch.

Example:
    log = logs.get("rollout")
    log.info("sample submitted", draw=17, sample=3, version=9)
    {"time": "2026-11-29T15:04:05.123Z", "level": "info", "service": "rollout", "instance": "rollout-0", "run": "demo",
     "logger": "rollout", "message": "sample submitted", "draw": 17, "sample": 3, "version": 9}

Lines of libraries go through the same formatter, from warnings up.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import TextIO

_ROOT = "slipstream"
_FIELDS = "slipstream_fields"


class Log:
    """A named logger whose keyword arguments become fields of the line."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, message: str, **fields: object) -> None:
        self._write(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: object) -> None:
        self._write(logging.INFO, message, fields)

    def warning(self, message: str, **fields: object) -> None:
        self._write(logging.WARNING, message, fields)

    def error(self, message: str, **fields: object) -> None:
        self._write(logging.ERROR, message, fields)

    def exception(self, message: str, error: BaseException | None = None, **fields: object) -> None:
        """An error with its traceback; without `error`, the one that is being handled."""
        error = error or sys.exc_info()[1]
        self._write(logging.ERROR, f"{message}: {error!r}", fields, error)

    def _write(self, level: int, message: str, fields: dict[str, object], error: BaseException | None = None) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", message, extra={_FIELDS: fields}, exc_info=error)


def get(name: str) -> Log:
    """The logger of a part of the program."""
    return Log(logging.getLogger(f"{_ROOT}.{name}"))


def configure(service: str, instance: str, run: str, stream: TextIO | None = None, level: str = "INFO") -> None:
    """Send every log line of this process to `stream` (default: stderr) as JSON. Calling again replaces the former target."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonLines(service, instance, run))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(_ROOT).setLevel(level)


class _JsonLines(logging.Formatter):
    def __init__(self, service: str, instance: str, run: str) -> None:
        super().__init__()
        self._process = {"service": service, "instance": instance, "run": run}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            **self._process,
            "logger": record.name.removeprefix(f"{_ROOT}."),
            "message": record.getMessage(),
        }
        for name, value in getattr(record, _FIELDS, {}).items():
            line.setdefault(name, value)
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        return json.dumps(line, default=str)
