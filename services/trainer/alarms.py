"""Bands that a step's figures should stay in, and the alarm of each that does not.

A single step outside of a band is noise. An alarm is raised when a figure is outside for `alarms.steps` steps in a row and
cleared after as many inside: one log line each time, the gauge slipstream_alarm{name}, and the sentence in the line of the
step, from where `slipstream status` and the live view have it. Steps without the figure (no token at lag 0, no routes) neither
count nor interrupt; a step that trained nothing is judged by its signal alone.

Why these defaults, in docs/guides/operations.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream import config, logs

NONFINITE = "nonfinite"  # raised by a single skipped step

log = logs.get("trainer.alarms")


@dataclass(frozen=True, slots=True)
class Band:
    """What is judged: `figure` of a step's line, at most (or at least) the setting alarms.`name`; 0 = not judged."""

    name: str
    figure: str
    what: str
    least: bool = False
    always: bool = False  # also in a step that trained nothing


BANDS = (
    Band("numeric_gap", "gap_fresh_mean", "mean |trainer - sampler| log-probability at lag 0"),
    Band("staleness_gap", "gap_stale_mean", "mean |trainer - sampler| log-probability above lag 0"),
    Band("k3", "k3", "estimated KL of sampler and trainer"),
    Band("ratio_max", "ratio_max", "largest probability ratio"),
    Band("ess", "ess", "effective sample size, as a share,", least=True),
    Band("clip_share", "clip_share", "share of clipped tokens"),
    Band("route_flip_share", "route_flip_share", "share of routes that the trainer would take otherwise"),
    Band("expert_load", "expert_load_max", "load of the busiest expert over the mean"),
    Band("dead_experts", "dead_expert_share", "share of experts without a token"),
    Band("grad_norm", "grad_norm", "gradient norm"),
    Band("entropy", "entropy", "entropy", least=True),
    Band("without_signal", "without_signal_share", "share of groups without signal", always=True),
)
NAMES = (*(band.name for band in BANDS), NONFINITE)


@dataclass(slots=True)
class _State:
    """Of one alarm: steps in a row that contradict it, the first of them, and its sentence while it is raised."""

    contrary: int = 0
    first: int = 0
    sentence: str = ""


class Alarms:
    """The alarms of a run. `show(name, raised)` sets their gauges."""

    def __init__(self, settings: config.Alarms, show: Callable[[str, bool], object]) -> None:
        self._settings, self._show = settings, show
        self._states = {name: _State() for name in NAMES}
        for name in NAMES:
            show(name, False)

    @property
    def raised(self) -> dict[str, str]:
        """Sentences of the alarms that are raised, by name."""
        return {name: state.sentence for name, state in self._states.items() if state.sentence}

    def resume(self, entries: list[dict[str, Any]]) -> None:
        """Go through the lines of steps before a restart, so that an alarm outlives it. Nothing is logged."""
        for entry in entries:
            self.judge(entry, quiet=True)

    def judge(self, entry: Mapping[str, Any], quiet: bool = False) -> None:
        """One step's line."""
        step, trained = entry["step"], entry.get("trained_tokens", 0) > 0
        if "skipped" in entry:
            skipped = bool(entry["skipped"])
            self._note(NONFINITE, skipped, 1 if skipped else self._settings.steps, step, quiet,
                       "a loss or gradient was not finite, the step was skipped")
        for band in BANDS:
            limit, value = getattr(self._settings, band.name), entry.get(band.figure)
            if limit and value is not None and (trained or band.always):
                outside = value < limit if band.least else value > limit
                self._note(band.name, outside, self._settings.steps, step, quiet,
                           f"{band.what} is {value:.3g}, {'below' if band.least else 'above'} {limit:g}")

    def _note(self, name: str, outside: bool, needed: int, step: int, quiet: bool, sentence: str) -> None:
        state = self._states[name]
        if outside == bool(state.sentence):
            state.contrary = 0
            if outside:
                state.sentence = f"{sentence} (since step {state.first})"
            return
        if not state.contrary and outside:
            state.first = step
        state.contrary += 1
        if state.contrary < needed:
            return
        state.contrary = 0
        state.sentence = f"{sentence} (since step {state.first})" if outside else ""
        self._show(name, outside)
        if quiet:
            return
        if outside:
            log.warning(f"alarm {name}: {state.sentence}", step=step)
        else:
            log.info(f"alarm {name} is over", step=step)
