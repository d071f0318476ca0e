"""Two releases in one run: a rolling upgrade, service by service, while the run is disturbed.

consumes      a revision of this repository, the minutes of a chaos run
produces      its files in a folder beside the run; services that start from them, and later from the working tree
waits for     TRAINED steps in each mixture; the end of each process that is asked to stop
unblocked by  time, and the supervisor, which starts again what was asked to stop

All services begin on the former release. Then one after the other, as `helm upgrade` would, each process gets SIGTERM, drains,
and starts again from the working tree. Runs under both orders of ORDERS have seen each half of the services on either side.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults.divert import Site
from benchmarks.faults.victims import ROOT, Ended, Run
from slipstream.cli.audit import rows

ORDERS = {
    "buffer-first": ("buffer", "reward", "rollout", "trainer"), "trainer-first": ("trainer", "rollout", "reward", "buffer")}
LAST = "last"
TRAINED = 5  # optimizer steps that each mixture has to train
DRAIN_S = 60.0
LOOK_S = 0.25
PHASE_S = 120.0  # a mixture that does not train TRAINED steps within this, and its share of the time, is a finding
RECORD = "tools/released.json"  # changes with each release and with nothing else


class NoRelease(Exception):
    """There is nothing to upgrade from; the message says what is missing."""


def former(revision: str = "") -> str:
    """The commit of `revision`, or of the last release: the newest tag v*, else the commit that recorded it."""
    found = revision or _git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD") or _recorded()
    commit = found and _git("rev-parse", "--verify", "--quiet", f"{found}^{{commit}}")
    if not commit:
        raise NoRelease(
            f"{found or 'the last release'} is not in this clone, there is nothing to upgrade from: git fetch --unshallow "
            "--tags, or name a revision with --previous")
    return commit


def _recorded() -> str:
    """The commit that recorded the last release. Where history is cut off, everything seems to be of the first commit there."""
    commit = _git("log", "-1", "--format=%H", "--", RECORD)
    cut_off = _git("rev-parse", "--is-shallow-repository") == "true" and _git("rev-list", "--count", commit) == "1"
    return "" if cut_off else commit


def _git(*words: str) -> str:
    """What git says; empty when it says nothing or fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if not done.returncode else ""


def unpack(commit: str, folder: Path) -> Path:
    """The files of a commit, below `folder`."""
    folder.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


@dataclass
class Mixture:
    """What ran together for a while, and what it trained."""

    former: tuple[str, ...]  # services of the former release
    steps: int = 0
    lives: Mapping[str, int] = field(default_factory=dict)  # process starts by "service release", up to its end


class Upgrade:
    """The upgrade of one run. `seconds` are for the whole of it; each mixture has an equal share."""

    def __init__(
            self, site: Site, run: Run, commit: str, order: Sequence[str], seconds: float, say: Callable[[str], None]) -> None:
        self.mixtures: list[Mixture] = []
        self._site, self._run, self._order, self._say = site, run, order, say
        self._share_s = seconds / (len(order) + 1)
        self._name = commit[:12]
        self._tree = unpack(commit, site.folder / "former")

    def begin(self) -> None:
        """Say, before anything is started, that every service is of the former release."""
        self._plan(self._order)

    def _plan(self, services: Sequence[str]) -> None:
        self._site.change_plan(releases={service: str(self._tree) for service in services})

    async def roll(self) -> None:
        """Mixture after mixture, until every service is of the working tree and all have trained. Raises Ended with the run."""
        for number in range(len(self._order) + 1):
            remaining = self._order[number:]
            if number:
                await self._over(self._order[number - 1], remaining)
            mixture = Mixture(tuple(remaining))
            self.mixtures.append(mixture)
            before, began = self.trained(), time.monotonic()
            while time.monotonic() < began + self._share_s or (
                    mixture.steps < TRAINED and time.monotonic() < began + self._share_s + PHASE_S):
                await asyncio.sleep(LOOK_S)
                if self._run.code is not None:
                    raise Ended
                mixture.steps = self.trained() - before
            mixture.lives = self.lives()

    async def _over(self, service: str, remaining: Sequence[str]) -> None:
        """Every process of a service to the working tree, one after the other."""
        self._say(f"{service}: {self._name} -> working tree")
        self._plan(remaining)
        for pid in self._run.pids(service):
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:  # killed meanwhile, and already started from the working tree
                continue
            deadline = time.monotonic() + DRAIN_S
            while _alive(pid) and time.monotonic() < deadline:  # noqa: ASYNC110 - another process waits for it
                await asyncio.sleep(0.1)

    def trained(self) -> int:
        """Lines of the trainer's record: optimizer steps, those that were trained again included."""
        return sum(1 for _ in rows(self._run.folder.trained))

    def lives(self) -> dict[str, int]:
        """Process starts by "service release"."""
        found: dict[str, int] = {}
        for line in self._site.lives.read_text().splitlines() if self._site.lives.exists() else ():
            life = json.loads(line)
            name = f"{life['service']} {'former' if life['tree'] else 'new'}"
            found[name] = found.get(name, 0) + 1
        return found

    def complaints(self) -> list[str]:
        """What an upgrade under load should have seen, and did not."""
        found = [f"with {', '.join(m.former) or 'nothing'} of the former release only {m.steps} steps were trained, {TRAINED} "
                 "are needed" for m in self.mixtures if m.steps < TRAINED]
        if len(self.mixtures) <= len(self._order):
            found.append(f"the run was over after {len(self.mixtures)} of {len(self._order) + 1} mixtures")
        lives = self.lives()
        found += [f"{service} was never started from the {where} release" for service in self._order
                  for where in ("former", "new") if not lives.get(f"{service} {where}")]
        return found

    def table(self) -> list[list[str]]:
        """A row for each mixture: who was of the former release, steps trained."""
        services = ORDERS["buffer-first"]
        return [[*("former" if service in m.former else "new" for service in services), str(m.steps)] for m in self.mixtures]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
