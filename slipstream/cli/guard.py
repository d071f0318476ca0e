"""Ends the processes of a run whose supervisor was killed.

A small process beside the supervisor, standard library only, started by path. It reads lines from a pipe whose other end only
the supervisor holds: `add GROUP STAGE` and `remove GROUP`. End of file means that the supervisor is gone; if groups are left
then, they get SIGTERM stage by stage, lowest first, and SIGKILL after the grace. The supervisor's own orderly end removes
every group first, so the guard has nothing to do.
"""

from __future__ import annotations

import os
import signal
import sys
import time


def read_groups(pipe: int) -> dict[int, int]:
    """Process groups by stage, as they stand at the end of file."""
    groups: dict[int, int] = {}
    with os.fdopen(pipe) as lines:
        for line in lines:
            verb, group, *stage = line.split()
            if verb == "add":
                groups[int(group)] = int(stage[0])
            else:
                groups.pop(int(group), None)
    return groups


def end(groups: dict[int, int], grace_s: float) -> None:
    """Stop the groups in the order of their stages; each stage has the grace, then SIGKILL."""
    for stage in sorted(set(groups.values())):
        members = [g for g, s in groups.items() if s == stage]
        for group in members:
            _signal(group, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while any(_lives(g) for g in members) and time.monotonic() < deadline:
            time.sleep(0.05)
        for group in members:
            _signal(group, signal.SIGKILL)


def _lives(group: int) -> bool:
    """True while the group has a process. A dead leader that nobody has reaped does not count (where /proc tells)."""
    try:
        with open(f"/proc/{group}/stat") as file:  # noqa: PTH123 - pathlib is slow to import
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return _signal(group, 0)


def _signal(group: int, number: int) -> bool:
    """True while the group has a process."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return number == 0
    return True


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    end(read_groups(int(sys.argv[1])), float(sys.argv[2]))
