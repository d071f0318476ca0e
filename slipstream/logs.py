"""JSON lines: one object per line with time, level, service, instance, run, logger, message, and fields such as draw, sample,
version or batch.

Example:
    log = logs.get("rollout")
    log.info("sample submitted", draw=17, sample=3, version=9)
    {"time": "2026-11-29T15:04:05.123Z", "level": "info", "service": "rollout", "instance": "rollout-0", "run": "demo",
     "logger": "rollout", "message": "sample submitted", "draw": 17, "sample": 3, "version": 9}

Lines of libraries go through the same formatter, from warnings up.

No line carries a token or a password. Text that may quote a prompt or an answer, such as the message of an exception of a
user's environment, is marked by whoever logs it (`Content`, `quotes=True`) and shortened to its kind unless it is asked for.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from datetime import UTC, datetime
from typing import TextIO

_ROOT = "slipstream"
_FIELDS, _QUOTES = "slipstream_fields", "slipstream_quotes"
OPTION = "security.log_content"  # what lets such text through
WITHHELD = f"(withheld, see {OPTION})"
# Beginnings that our own code writes: "environment e: reset raised KeyError", "exception: Boom", "ValueError", "non-finite".
_KIND = re.compile(
    r"(?:environment [\w.-]+: )?(?:(?:reset|step|start) raised |exception: |sandbox: )[\w.]+"
    r"|[A-Za-z_][\w.]*(?:Error|Exception)(?=: )|[a-z][a-z -]{0,40}(?=:)")
# Authorization headers, and passwords in URLs.
_PROOFS = re.compile(r"(\bBearer |\bSlipstream \w{1,20}:)[^\s\"'\\]{6,}|(://[^:@/\s\"]{0,80}:)[^@/\s\"]+(?=@)")


class Content(str):
    """Text that may quote prompts or answers."""

    __slots__ = ()


def withheld(text: str, mark: str = WITHHELD) -> str:
    """What is left of such a text: the kind of failure that it begins with, and `mark`."""
    kind = _KIND.match(text)
    return f"{kind[0]} {mark}" if kind else mark


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

    def exception(self, message: str, error: BaseException | None = None, quotes: bool = False, **fields: object) -> None:
        """An error with its traceback; without `error`, the one that is being handled. `quotes`: it may quote a prompt."""
        error = error or sys.exc_info()[1]
        said = f"{message}: {error!r}" if not quotes else message
        self._write(logging.ERROR, said, fields, error, quotes)

    def _write(
        self, level: int, message: str, fields: dict[str, object], error: BaseException | None = None, quotes: bool = False,
    ) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", message, extra={_FIELDS: fields, _QUOTES: quotes}, exc_info=error)


def get(name: str) -> Log:
    """The logger of a part of the program."""
    return Log(logging.getLogger(f"{_ROOT}.{name}"))


def configure(
    service: str, instance: str, run: str, stream: TextIO | None = None, level: str = "INFO", content: bool = False,
    option: str = OPTION,
) -> None:
    """Send every log line of this process to `stream` (default: stderr) as JSON, `Content` only if asked for: by `option`,
    which lines without it name. Calling again replaces the former target."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonLines(service, instance, run, content, option))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(_ROOT).setLevel(level)


class _JsonLines(logging.Formatter):
    def __init__(self, service: str, instance: str, run: str, content: bool, option: str) -> None:
        super().__init__()
        self._content, self._mark = content, f"(withheld, see {option})"
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
            line.setdefault(name, value if self._content or not isinstance(value, Content) else withheld(value, self._mark))
        if record.exc_info and (error := record.exc_info[1]) is not None:
            told = self._content or not getattr(record, _QUOTES, False)
            if getattr(record, _QUOTES, False):
                line["message"] = f"{line['message']}: {error!r}" if told else f"{line['message']}: {_kind(error, self._mark)}"
            line["traceback"] = "".join(traceback.format_exception(error) if told else _frames(error, self._mark))
        return _PROOFS.sub(r"\1\2***", json.dumps(line, default=str))


def _kind(error: BaseException, mark: str) -> str:
    return f"{type(error).__name__} {mark}"


def _frames(error: BaseException, mark: str) -> list[str]:
    """A traceback without messages: where it was raised, through its causes."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    before = [*_frames(cause, mark), "\n"] if cause is not None else []
    return [*before, *traceback.format_tb(error.__traceback__), f"{_kind(error, mark)}\n"]
