"""The process that runs users' scorers: JSON lines in on stdin, JSON lines out on what was stdout, one answer each, in order.

Standard library only, so that a killed process is replaced in tens of milliseconds. What a scorer prints goes to stderr. Each
call is under an interval timer whose default action ends the process: even C code that holds the interpreter lock (a
backtracking pattern) is ended by the kernel, and so is a process whose parent is gone.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from functools import cache
from numbers import Real
from typing import Any

LONGEST = 500  # characters of a failure
GRACE_S = 5.0  # the service kills at the limit; the timer here is for when the service is gone


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the service decides
    for line in sys.stdin:
        job = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, job["timeout_s"] + GRACE_S)
        started = time.perf_counter()
        answer = run(job) | {"seconds": time.perf_counter() - started}
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Score one job; an exception is an answer with `failure`."""
    try:
        if job["scorer"] == "regex":
            return {"scalar": float(re.search(job["answer"], job["response"]) is not None)}
        function = find(job["scorer"])
        if job.get("load"):
            return {}
        value = function(job["prompt"], job["response"], job["answer"], job["info"])
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return normal(value)
    except BaseException as error:  # also SystemExit: a scorer that calls exit() has failed, the process has not
        return {"failure": f"exception: {type(error).__name__}: {error}"[:LONGEST]}


@cache
def find(scorer: str) -> Callable[..., Any]:
    """The callable behind "module:function"."""
    module, _, name = scorer.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{scorer} is a {type(function).__name__}, not a function")
    return function


def normal(value: Any) -> dict[str, Any]:
    """A number, or a dict with scalar, per_turn, components and failure, as plain finite floats."""
    if not isinstance(value, dict):
        value = {"scalar": value}
    if unknown := set(value) - {"scalar", "per_turn", "components", "failure"}:
        return {"failure": f"the scorer returned the unknown key {sorted(unknown)[0]!r}"}
    if failure := value.get("failure"):
        return {"failure": str(failure)[:LONGEST]}
    scalar = number(value.get("scalar"), "scalar")
    per_turn = [number(v, f"per_turn[{i}]") for i, v in enumerate(value.get("per_turn") or ())]
    components = {str(k): number(v, f"components.{k}") for k, v in (value.get("components") or {}).items()}
    for place, numbers in (("scalar", [scalar]), ("per_turn", per_turn), ("components", list(components.values()))):
        if bad := [v for v in numbers if not math.isfinite(v)]:
            return {"failure": f"non-finite: {place} = {bad[0]}"}
    return {"scalar": scalar, "per_turn": per_turn, "components": components}


def number(value: Any, place: str) -> float:
    """A real number, also numpy's or torch's."""
    if isinstance(value, Real) or (hasattr(value, "__float__") and not isinstance(value, str)):
        return float(value)
    raise TypeError(f"{place} is a {type(value).__name__}, not a number")


if __name__ == "__main__":
    main()
