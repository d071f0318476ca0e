"""What vLLM's scheduler says of itself after every step: how much it has done, and whether it has too much to do."""

# pyright: reportMissingImports=false
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.rollout.concurrency import Drafts, Load

MEAN_STEPS = 64  # about a second of steps


@dataclass(slots=True)
class Signals:
    """The last step's figures, and sums since the start. Kept across restarts of the engine."""

    running: int = 0  # requests that were decoded
    waiting: int = 0  # requests without room
    cache_share: float = 0.0  # share of the cache's blocks in use, 0 to 1
    preemptions: int = 0  # requests that lost their cache to others, in sum; each is computed anew
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0  # of the prompt tokens, those that the prefix cache spared
    steps: int = 0
    drafts: int = 0  # guesses that were judged, one a request and step
    draft_tokens: int = 0
    accepted_tokens: int = 0
    _mean_running: float = 0.0
    _mean_share: float = 0.0

    def step(self, running: int, waiting: int, cache_share: float) -> None:
        """Take note of the scheduler after a step."""
        self.running, self.waiting, self.cache_share = running, waiting, cache_share
        self._mean_running += (running - self._mean_running) / MEAN_STEPS
        self._mean_share += (cache_share - self._mean_share) / MEAN_STEPS

    def load(self, loads: int) -> Load:
        """What the bound on samples in hand looks at, after `loads` loads of weights."""
        each = self._mean_share / self._mean_running if self._mean_running else 0.0
        drafts = Drafts(self.drafts, self.draft_tokens, self.accepted_tokens)
        return Load(self.running, self.waiting, self.cache_share, self.preemptions, loads, each, drafts)

    def judged(self, drafts: int, tokens: int, accepted: int) -> None:
        """Take note of the guesses of a step."""
        self.drafts += drafts
        self.draft_tokens += tokens
        self.accepted_tokens += accepted

    def rest(self) -> None:
        """Nothing is in flight: vLLM says nothing of that."""
        self.running = self.waiting = 0


def logger(signals: Signals, observe: Callable[[float], None] | None) -> Any:
    """A factory of vLLM's StatLoggerBase that writes into `signals`; `observe(seconds)` is told of every step."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class SignalLogger(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._last = 0.0

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if scheduler_stats is not None:
                signals.step(
                    scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs, scheduler_stats.kv_cache_usage)
                if (guesses := scheduler_stats.spec_decoding_stats) is not None:
                    signals.judged(guesses.num_drafts, guesses.num_draft_tokens, guesses.num_accepted_tokens)
            if iteration_stats is not None:
                signals.generated_tokens += iteration_stats.num_generation_tokens
                signals.preemptions += iteration_stats.num_preempted_reqs
                prompts = iteration_stats.prompt_token_stats
                signals.prompt_tokens += prompts.total
                signals.cached_prompt_tokens += prompts.cached_tokens
                signals.steps += 1
                now = time.perf_counter()
                if observe is not None and self._last and now - self._last < 1.0:  # longer is a pause, not a step
                    observe(now - self._last)
                self._last = now

        def log_engine_initialized(self) -> None:
            self._last = 0.0

    return SignalLogger
