"""Carries out the faults of a schedule on a run.

consumes      two endless lists of faults: of processes and of connections    produces: dead and stopped processes, torn links
waits for     the pause before each fault; a process that is just being started
unblocked by  time; and by the run itself: when nothing was trained for HOLD_S, faults pause until a step is trained, so that a
              slow machine is disturbed less often, not for ever. Nothing for STALL_S, undisturbed: that is a finding, `Stalled`
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping

from benchmarks.faults.proxy import Proxy
from benchmarks.faults.schedule import Fault
from benchmarks.faults.victims import Ended, Run

HOLD_S = 15.0
STALL_S = 150.0
LOOK_S = 0.1
GAP_S = 0.3  # between two faults of a list, at least


class Stalled(Exception):
    """Nothing was trained for STALL_S although nothing was disturbed."""


class Injector:
    """`counts` are the faults that hit, by (action, target)."""

    def __init__(self, run: Run, proxies: Mapping[str, Proxy], seed: int, tell: Callable[[str], None]) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._run, self._proxies, self._tell = run, proxies, tell
        self._chance = random.Random(f"victims {seed}")
        self._trained, self._since = 0, time.monotonic()
        self._beside: set[asyncio.Task[None]] = set()

    def kills(self, target: str = "") -> int:
        """SIGKILLs, of one kind of process or of all."""
        return sum(n for (action, who), n in self.counts.items() if action == "kill" and target in ("", who))

    async def disturb(
            self, seconds: float, processes: Iterator[Fault], links: Iterator[Fault],
            upgrade: Callable[[], Awaitable[None]] | None = None) -> None:
        """Until the time is over, or the `upgrade`, or the run. Everything stopped goes on afterwards. Raises Stalled."""
        self._since = time.monotonic()
        tasks = [asyncio.create_task(self._all(processes, self._hit_process), name="process faults"),
                 asyncio.create_task(self._all(links, self._hit_link), name="link faults")]
        if upgrade is not None:
            tasks.append(asyncio.ensure_future(upgrade()))
        try:
            ended, _ = await asyncio.wait(
                tasks, timeout=seconds if upgrade is None else None, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                with contextlib.suppress(Ended):
                    await task
        finally:
            for task in (*tasks, *self._beside):
                task.cancel()
            await asyncio.gather(*tasks, *self._beside, return_exceptions=True)
            await self._run.settle()
            self._run.go_on()

    async def rest(self) -> int:
        """Disturb nothing until the run ends; its exit code. Raises Stalled."""
        self._since = time.monotonic()
        end = asyncio.create_task(self._run.wait(), name="end of the run")
        while not (await asyncio.wait({end}, timeout=LOOK_S))[0]:
            if self._quiet_s > STALL_S:
                end.cancel()
                raise Stalled
        return end.result()

    @property
    def _quiet_s(self) -> float:
        """Seconds since something was trained."""
        if (trained := self._run.trained) != self._trained:
            self._trained, self._since = trained, time.monotonic()
        return time.monotonic() - self._since

    async def _all(self, faults: Iterator[Fault], hit: Callable[[Fault], Awaitable[None]]) -> None:
        due = time.monotonic()
        for fault in faults:
            due += fault.after_s
            await asyncio.sleep(max(GAP_S, due - time.monotonic()))  # who was held up comes sooner
            while self._quiet_s > HOLD_S:
                if self._quiet_s > STALL_S:
                    raise Stalled
                if self._run.code is not None:
                    raise Ended
                await asyncio.sleep(LOOK_S)
            await hit(fault)

    async def _hit_process(self, fault: Fault) -> None:
        while not (pids := self._run.pids(fault.target)):  # noqa: ASYNC110 - another process starts it
            await asyncio.sleep(LOOK_S)
        pid = self._chance.choice(pids)
        with contextlib.suppress(ProcessLookupError):  # it died before we came
            if fault.action == "kill":
                self.counts["kill", fault.target] += 1
                self._tell(f"kill {fault.target} {pid}")
                await self._run.kill(fault.target, pid)
            else:
                self.counts["stop", fault.target] += 1
                self._tell(f"stop {fault.target} {pid} for {fault.seconds:.1f} s")
                task = asyncio.create_task(self._stop(pid, fault.seconds), name=f"stop {fault.target}")
                self._beside.add(task)
                task.add_done_callback(self._beside.discard)

    async def _stop(self, pid: int, seconds: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            await self._run.stop(pid, seconds)

    async def _hit_link(self, fault: Fault) -> None:
        proxy = self._proxies[fault.target]
        if fault.action == "reset":
            hit = proxy.reset()
        elif fault.action == "lost reply":
            hit = await proxy.lose_reply()
        else:
            hit = await proxy.delay(fault.seconds)
        if hit:
            self.counts[fault.action, fault.target] += 1
            self._tell(f"{fault.action} {fault.target}")
        if self._run.code is not None:
            raise Ended
