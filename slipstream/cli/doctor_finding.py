"""One line of `slipstream doctor`."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "FAIL"


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is (OK, WARN or FAIL), and a sentence; unless OK, with the remedy."""

    name: str
    state: str
    text: str
