"""A run that is disturbed: its supervisor, started again whenever it was killed, and its processes by name."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from benchmarks.faults.divert import Site
from slipstream.cli.run_folder import RunFolder, held, read_json

ROOT = Path(__file__).resolve().parents[2]
SUPERVISOR_RESTART_S = 0.2
END_S = 60.0


class Ended(Exception):
    """The supervisor has ended by itself."""


class Run:
    """One run under `slipstream run` with diverted services."""

    def __init__(self, site: Site, run_file: Path) -> None:
        self.site, self.folder, self._run_file = site, RunFolder(site.run), run_file
        self.output = site.folder / "supervisor.log"
        self._process: asyncio.subprocess.Process | None = None
        self._restart: asyncio.Task[None] | None = None
        self._stopped: set[int] = set()

    async def start(self, fresh: bool = False) -> None:
        """Start the supervisor; it resumes what the folder holds unless `fresh`."""
        with self.output.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.faults.supervise", str(self._run_file), *(["--fresh"] if fresh else []),
                cwd=ROOT, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})

    @property
    def code(self) -> int | None:
        """Exit code of the supervisor; None while it runs, or is being started again."""
        assert self._process is not None
        return None if self._restarting else self._process.returncode

    @property
    def _restarting(self) -> bool:
        return self._restart is not None and not self._restart.done()

    def pids(self, target: str) -> list[int]:
        """Process ids behind a name of PROCESSES that are there now."""
        if self.code is not None:
            raise Ended
        if self._restarting:
            return []
        assert self._process is not None
        if target == "supervisor":
            return [self._process.pid]
        state = read_json(self.folder.state) or {}
        if state.get("pid") != self._process.pid:  # of a supervisor that was killed
            return []
        return [p["pid"] for p in state["processes"].values() if p["service"] == target and p["pid"]]

    async def kill(self, target: str, pid: int) -> None:
        """SIGKILL; a killed supervisor is started again, while what it left behind still ends."""
        os.kill(pid, signal.SIGKILL)
        if target == "supervisor":
            self._restart = asyncio.create_task(self._start_again(), name="start the supervisor again")
            await asyncio.shield(self._restart)

    async def settle(self) -> None:
        """Wait until a killed supervisor has been started again, also when whoever killed it was cancelled."""
        if self._restart is not None:
            await self._restart

    async def _start_again(self) -> None:
        assert self._process is not None
        await self._process.wait()
        await asyncio.sleep(SUPERVISOR_RESTART_S)
        await self.start()

    async def stop(self, pid: int, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        os.kill(pid, signal.SIGSTOP)
        self._stopped.add(pid)
        await asyncio.sleep(seconds)
        self._go_on(pid)

    def go_on(self) -> None:
        """Nothing is stopped any more."""
        for pid in list(self._stopped):
            self._go_on(pid)

    def _go_on(self, pid: int) -> None:
        self._stopped.discard(pid)
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:  # it was killed meanwhile
            return

    async def wait(self) -> int:
        """The end of the run."""
        assert self._process is not None
        return await self._process.wait()

    async def end(self) -> None:
        """Whatever happened, leave nothing behind: the guard of a killed supervisor ends its processes."""
        await self.settle()
        self.go_on()
        assert self._process is not None
        if self.code is None:
            self._process.kill()
            await self._process.wait()
        deadline = time.monotonic() + END_S
        while held(self.folder) and time.monotonic() < deadline:  # noqa: ASYNC110 - other processes hold it
            await asyncio.sleep(0.1)

    @property
    def last_words(self) -> str:
        """The last line that the supervisor said."""
        lines = self.output.read_text(errors="replace").strip().splitlines() if self.output.exists() else []
        return lines[-1] if lines else ""

    @property
    def trained(self) -> int:
        """Grows with every step that is trained: bytes of the trainer's record."""
        return self.folder.trained.stat().st_size if self.folder.trained.exists() else 0
