"""Follows a run from its folder and shows it: the live view on a terminal, lines elsewhere.

Reads <folder>/supervisor.json, <folder>/metrics.jsonl and GetStatus of every process; changes nothing. `slipstream run` shows
its own run with it, `slipstream watch` any other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

from rich.console import Console
from rich.live import Live

from slipstream.cli.metrics import WINDOW, Metrics
from slipstream.cli.run_folder import RunFolder, read_json
from slipstream.cli.survey import ServiceStatus, Survey
from slipstream.cli.view import Snapshot, clock, draw, line, waits_line
from slipstream.config import RunFile

REFRESH_S = 0.4  # the screen
ASK_EVERY_S, PLAIN_ASK_EVERY_S = 1.0, 3.0  # the processes: each answer takes CPU of theirs, and lines tell less of it
PLAIN_EVERY_S = 0.5  # the files, when printing lines
QUIET_S = 30.0  # after this long without a line, a line says what everybody waits for


class Watcher:
    """The eyes on one run folder. `follow()` until the run has ended or `done` is set."""

    def __init__(self, folder: RunFolder, run: RunFile, console: Console) -> None:
        self.folder, self.run, self.console = folder, run, console
        self.metrics = Metrics(folder.metrics)
        self.done = asyncio.Event()
        self._services: list[ServiceStatus] = []
        self._asked = self._printed = 0.0
        self._ask_every_s = ASK_EVERY_S

    async def snapshot(self, survey: Survey) -> Snapshot:
        """The run as it is now; processes are asked now and then only."""
        self.metrics.poll()
        state = read_json(self.folder.state) or {}
        now = time.monotonic()
        if state.get("state") == "ended":  # the last frame keeps what the processes said last
            self._services = [dataclasses.replace(s, state=entry["state"], restarts=entry["restarts"], waiting_for="")
                              for s in self._services if (entry := state["processes"].get(s.instance)) is not None]
        elif now - self._asked >= self._ask_every_s:
            self._asked = now
            self._services = await survey.ask_all()
        return Snapshot(
            run=self.run.run.name, steps=self.run.run.steps, metrics=self.metrics, state=state.get("state", "not started"),
            stall=state.get("stall", ""),
            elapsed_s=max(0.0, time.time() - state.get("started_unix", time.time())), max_lag=self.run.schedule.max_lag,
            target_reward=self.run.run.target_reward, services=self._services,
            events=[(e["time_unix"], e["event"]) for e in state.get("events", [])])

    async def follow(self, plain: bool) -> None:
        """Show the run until it ends."""
        async with Survey(self.folder) as survey:
            if plain:
                await self._lines(survey)
            else:
                await self._live(survey)

    async def _live(self, survey: Survey) -> None:
        with Live(console=self.console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
            while True:
                last = self.done.is_set()
                snapshot = await self.snapshot(survey)
                live.update(draw(snapshot, self.console.width), refresh=True)
                if last or snapshot.state == "ended":
                    return
                await self._pause(REFRESH_S)

    async def _lines(self, survey: Survey) -> None:
        shown_step, shown_event, self._ask_every_s = -1, 0.0, PLAIN_ASK_EVERY_S
        self._print(f"{clock(time.time())} run {self.run.run.name} in {self.folder.path}")
        while True:
            last = self.done.is_set()
            snapshot = await self.snapshot(survey)
            for at, event in snapshot.events:
                if at > shown_event:
                    shown_event = at
                    self._print(f"{clock(at)} {event}")
            step = self.metrics.step
            if shown_step < 0 or step // WINDOW != shown_step // WINDOW or (last and step != shown_step):
                if step:
                    self._print(line(snapshot))
                shown_step = step
            if last or snapshot.state == "ended":
                return
            if time.monotonic() - self._printed > QUIET_S:
                self._print(waits_line(snapshot))
            await self._pause(PLAIN_EVERY_S)

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self.done.wait(), seconds)
        except TimeoutError:
            return
