"""The bound on samples in hand finds what an engine's cache has room for, and leaves an engine with room alone.

On a model of a scheduler, and on what vLLM said of itself at fixed bounds: recorded/vllm_signals.json, made by
`python -m benchmarks.concurrency --engines vllm --rounds 1 --seconds 4 --slots 16,24,32,40,48,56,64,96,128 --signals FILE`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from services.rollout.concurrency import SETTLE, Concurrency, Load
from services.rollout.vllm_signals import Signals

STEPS = 3600


class Engine:
    """A cache of `blocks`, requests that grow from `prompt` to `prompt + length` tokens, a step that costs `fixed` + tokens.

    Preempts the youngest when nothing is free, and computes it again, as vLLM does. Time is in units of one token.
    """

    def __init__(self, blocks: int, prompt: int, length: int, seed: int, fixed: float = 40.0) -> None:
        self.blocks, self.prompt, self.length, self.fixed = blocks, prompt, length, fixed
        self.random = np.random.default_rng(seed)
        self.running: list[list[int]] = []  # [tokens in the cache, tokens to go]
        self.waiting: list[list[int]] = []
        self.preemptions = self.tokens = 0
        self.time = 0.0

    def use(self) -> int:
        return sum(-(-r[0] // 16) for r in self.running)

    def step(self, most: int) -> None:
        while len(self.running) + len(self.waiting) < most:
            self.waiting.append([self.prompt, int(self.random.integers(1, 2 * self.length))])
        while self.waiting and self.use() + -(-(self.waiting[0][0] + 1) // 16) <= self.blocks:
            request = self.waiting.pop(0)
            self.time += request[0]
            self.running.append(request)
        while sum(-(-(r[0] + 1) // 16) for r in self.running) > self.blocks:
            self.waiting.insert(0, self.running.pop())
            self.preemptions += 1
        for request in self.running:
            request[0] += 1
            request[1] -= 1
        self.tokens += len(self.running)
        self.time += self.fixed + len(self.running)
        self.running = [r for r in self.running if r[1] > 0]

    def load(self) -> Load:
        return Load(len(self.running), len(self.waiting), self.use() / self.blocks, self.preemptions, 0)


def throughput(engine: Engine, limit: int | Concurrency) -> float:
    """Tokens per unit of time over the second half of many steps; a look every 20 steps."""
    start = (0.0, 0)
    for step in range(STEPS):
        if step == STEPS // 2:
            start = (engine.time, engine.tokens)
        if isinstance(limit, Concurrency) and step % 20 == 0:
            limit.look(engine.load())
        engine.step(limit.limit if isinstance(limit, Concurrency) else limit)
    return (engine.tokens - start[1]) / (engine.time - start[0])


def test_it_comes_within_five_percent_of_the_best_hand_tuned_bound() -> None:
    """Caches for about 15 and 60 requests; the best of eight fixed bounds is what tuning by hand would find."""
    for blocks in (150, 600):
        fixed = {bound: throughput(Engine(blocks, 40, 100, 1), bound) for bound in (6, 12, 16, 24, 48, 64, 96, 192)}
        found = throughput(Engine(blocks, 40, 100, 1), Concurrency(192))
        assert found >= 0.95 * max(fixed.values()), (blocks, found, fixed)


def test_where_everything_fits_nothing_is_bounded() -> None:
    """Also while requests wait for a moment, as newcomers do between two steps."""
    bound = Concurrency(64)
    for waiting in (0, 5, 0, 60):
        assert bound.look(Load(60, waiting, 0.3, 0, 0)) == 64


def test_it_follows_answers_that_grow_and_shrink() -> None:
    """Pressure takes it to what fits; room lets it grow back, only while the bound is what holds the worker back."""
    bound = Concurrency(256)
    bound.look(Load(256, 0, 0.8, 0, 0))
    assert bound.look(Load(128, 100, 1.0, 30, 0)) == 128
    assert bound.look(Load(20, 0, 0.2, 30, 0)) == 128  # little to do: nothing is learned
    grown = [bound.look(Load(bound.limit, 0, 0.5, 30, 0)) for _ in range(40)]
    assert grown == sorted(grown) and grown[0] == 160 and grown[-1] == 256


def test_the_preemptions_of_a_swap_are_no_pressure() -> None:
    """A swap with on_swap = "recompute" preempts every request; the bound stays."""
    bound = Concurrency(256)
    bound.look(Load(200, 0, 0.9, 0, 0))
    for look in range(SETTLE + 1):
        assert bound.look(Load(100, 100, 0.96, 200 + look, 1)) == 256
    assert bound.look(Load(100, 100, 0.96, 240, 1)) < 256


FILE = Path(__file__).parent / "recorded" / "vllm_signals.json"
RECORDED: dict[int, list[list[float]]] = {int(bound): looks for bound, looks in json.loads(FILE.read_text()).items()}
BEST = (36, 56)  # the cache had room for 48 requests; with 32, and with 64, vLLM made fewer tokens of a CPU-second


def replay(bound: Concurrency, looks: int, at_least: Callable[[int], int] = lambda look: 0) -> list[int]:
    """The bound after each look at what vLLM said while it was held at the nearest recorded one."""
    said = {recorded: itertools.cycle(RECORDED[recorded]) for recorded in RECORDED}
    preemptions, found = 0, []
    for look in range(looks):
        now = max(bound.limit, at_least(look))
        nearest = min(RECORDED, key=lambda recorded, now=now: abs(recorded - now))
        running, waiting, share, preempted, each = next(said[nearest])
        preemptions += int(preempted)
        found.append(bound.look(Load(int(running), int(waiting), share, preemptions, 0, each), now))
    return found


@pytest.mark.parametrize("start", [16, 24, 128])
def test_on_what_vllm_says_it_is_where_vllm_is_best_within_seconds(start: int) -> None:
    """From above at the second look, half a second after the first, from far below in five looks; and then it stays."""
    bound = Concurrency(128)
    bound.limit = start
    found = replay(bound, 100)
    settled = found[1 if start == 128 else 5 :]
    assert BEST[0] <= min(settled) and max(settled) <= BEST[1], found


def test_what_was_taken_on_before_a_fall_takes_it_no_lower() -> None:
    """Those that 128 let in preempt each other for four seconds more: it does not fall on and on."""
    found = replay(Concurrency(128), 8, lambda look: 128)
    assert min(found) >= BEST[0], found


def test_samples_at_environments_count() -> None:
    """Half of what is in hand is with tools: forty requests fill the cache, so twice as many may be held, and a few more."""
    bound = Concurrency(256)
    bound.look(Load(40, 0, 0.95, 0, 0), 80)
    assert bound.look(Load(40, 20, 1.0, 5, 0, 0.95 / 40), 120) == 84
    assert bound.look(Load(20, 0, 0.5, 5, 0, 0.95 / 40), 80) == 89
    assert bound.look(Load(20, 0, 0.5, 5, 0, 0.95 / 40), 40) == 89  # it has little to do: nothing is learned


def test_a_requests_share_of_the_cache_is_a_mean_over_steps() -> None:
    """Requests begin and end in waves: forty that have just begun, then twenty before their end; they take a sixtieth each."""
    signals = Signals()
    assert not signals.load(0).each  # not known yet
    for step in range(512):
        signals.step(*((40, 0, 0.4) if step % 8 < 4 else (20, 5, 0.6)))
        assert step < 8 or 1 / 75 < signals.load(0).each < 1 / 48
    assert signals.load(0).running == 20 and signals.load(0).waiting == 5
