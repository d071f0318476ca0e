"""The rollout service of benchmarks.concurrency: `RUN-FILE BUFFER SLOTS ROUNDS SECONDS`, JSON on the last line.

Run by the interpreter that has the engine. The bound on samples in hand is either a fixed number or what the service's control
loop makes of the engine's signals; nothing else of the service is touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from services.rollout import service
from services.rollout.concurrency import Concurrency, Load
from slipstream import config, rpc
from slipstream.lifecycle import Lifecycle, SystemClock
from slipstream.service import ServiceContext, open_context
from slipstream.service_command import ServiceArguments

LOOK_S = 0.02
READY_S, DRAINED_S, FILLED_S = 300.0, 20.0, 0.5
BEGUN = 4  # times as long as a measurement: what the rule makes of the most
TOKENS, SLOTS, ACTIVE = "generated_tokens_total", "slots", "active_slots"


class Tuned(Concurrency):
    """The service's rule, or, while `fixed` is set, that number."""

    fixed, looks = 0, []  # of the one service that runs here; load, samples in hand and limit of each look

    def look(self, load: Load, in_hand: int = 0) -> int:
        if Tuned.fixed:
            self._before = None
        limit = Tuned.fixed or super().look(load, in_hand)
        Tuned.looks.append([*asdict(load).values(), in_hand, limit])
        return limit


@dataclass
class Watched:
    """What the metrics said at each change: (seconds, value), of tokens with the CPU-seconds."""

    tokens: list[tuple[float, float, float]] = field(default_factory=list)
    bounds: list[tuple[float, float]] = field(default_factory=list)

    def rate(self, start_s: float = 0.0) -> tuple[float, float]:
        """Tokens per second, and per CPU-second of this process, between the first and the last change after `start_s`."""
        first, *_, last = (at for at in self.tokens if at[0] >= start_s)
        return (last[1] - first[1]) / (last[0] - first[0]), (last[1] - first[1]) / (last[2] - first[2])


def value(context: ServiceContext, name: str) -> float:
    return context.registry.get_sample_value(f"slipstream_rollout_{name}") or 0.0


async def watch(context: ServiceContext, seconds: float) -> Watched:
    """The metrics of the next `seconds`."""
    found, start = Watched(), time.perf_counter()
    while (now := time.perf_counter() - start) < seconds:
        if not found.tokens or found.tokens[-1][1] != value(context, TOKENS):
            found.tokens.append((now, value(context, TOKENS), time.process_time()))
        if not found.bounds or found.bounds[-1][1] != value(context, SLOTS):
            found.bounds.append((now, value(context, SLOTS)))
        await asyncio.sleep(LOOK_S)
    return found


async def measured(context: ServiceContext, slots: int, seconds: float) -> tuple[float, float]:
    """Tokens per second, and per CPU-second, once no more than so many samples are in hand."""
    async with asyncio.timeout(DRAINED_S):
        while value(context, ACTIVE) > slots:  # noqa: ASYNC110 - a metric has no event
            await asyncio.sleep(LOOK_S)
    await asyncio.sleep(FILLED_S)
    return (await watch(context, seconds)).rate()


async def begun(context: ServiceContext, seconds: float) -> dict[str, Any]:
    """By the rule, from the most on: the rates, the bound over time, and when it was first where it is in the second half."""
    found = await watch(context, seconds)
    at_half = max(i for i, (at, _) in enumerate(found.bounds) if at <= seconds / 2)
    settled = [slots for _, slots in found.bounds[at_half:]]
    settle_s = next(at for at, slots in found.bounds if min(settled) <= slots <= max(settled))
    return {"rate": found.rate(), "settle_s": settle_s, "bounds": [(round(at, 2), int(slots)) for at, slots in found.bounds]}


@contextlib.asynccontextmanager
async def running(run: config.RunFile, buffer: str) -> AsyncIterator[ServiceContext]:
    """The service in this process, once it decodes."""
    lifecycle = Lifecycle(SystemClock(), 20)
    async with open_context(ServiceArguments(run, "rollout", "rollout-0", buffer), lifecycle, lifecycle.clock) as context:
        await service.start(context)
        ends = asyncio.create_task(lifecycle.run())
        try:
            async with asyncio.timeout(READY_S):
                while not value(context, TOKENS):
                    if ends.done():
                        raise SystemExit(f"the service ended: {lifecycle.reason}")
                    await asyncio.sleep(LOOK_S)
            yield context
        finally:
            lifecycle.request_stop("all is measured")
            await ends


async def on_one(run: config.RunFile, buffer: str, sizes: list[int], rounds: int, seconds: float) -> dict[str, Any]:
    """All arms on one engine, whose start takes long. The rule goes on from where it was the last time."""
    found: dict[str, Any] = {"arms": {n: [] for n in [*sizes, 0]}, "looks": {}}
    async with running(run, buffer) as context:
        found["begun"] = await begun(context, BEGUN * seconds)
        for _, n in itertools.product(range(rounds), [*sizes, 0]):
            Tuned.fixed, Tuned.looks = n, []
            found["arms"][n].append(await measured(context, n or max(sizes), seconds))
            found["looks"][n] = Tuned.looks
    return found


async def on_each(run: config.RunFile, buffer: str, sizes: list[int], rounds: int, seconds: float) -> dict[str, Any]:
    """Each arm with an engine of its own: one that has slots forms its passes by their number."""
    found: dict[str, Any] = {"arms": {n: [] for n in [*sizes, 0]}, "looks": {}}
    async with running(run, buffer) as context:
        found["begun"] = await begun(context, BEGUN * seconds)
    for _, n in itertools.product(range(rounds), [*sizes, 0]):
        rollout = run.rollout.model_copy(update={"slots": n or max(sizes), "adaptive_slots": not n})
        async with running(run.model_copy(update={"rollout": rollout}), buffer) as context:
            found["arms"][n].append(await measured(context, n or max(sizes), seconds))
    return found


def main() -> None:
    file, buffer, slots, rounds, seconds = sys.argv[1:]
    service.Concurrency = Tuned
    run = config.load(Path(file))
    arms = on_one if run.rollout.engine == "vllm" else on_each
    found = rpc.run(arms(run, buffer, [int(n) for n in slots.split(",")], int(rounds), float(seconds)))
    print(json.dumps(found))


if __name__ == "__main__":  # vLLM's process imports this file again
    main()
