"""The live view: one screen of rich, drawn from a Snapshot, and its one-line form for pipes and logs.

Drawing knows nothing of processes or files, so `run`, `watch` and tests use the same code. `watch.py` fills it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.cli.metrics import Metrics, sparkline
from slipstream.cli.survey import ServiceStatus

EVENTS_SHOWN = 5
_STATE_STYLE = {"serving": "green", "running": "green", "finished": "dim", "stopped": "dim", "starting": "yellow",
                "draining": "yellow", "backing off": "red", "silent": "red", "stalled": "red"}


@dataclass
class Snapshot:
    """Everything on the screen at one moment."""

    run: str
    steps: int
    metrics: Metrics
    state: str = "starting"
    elapsed_s: float = 0.0
    max_lag: int = 0
    target_reward: float | None = None
    services: Sequence[ServiceStatus] = ()
    events: Sequence[tuple[float, str]] = field(default_factory=tuple)
    stall: str = ""  # why the run does not get on; "" when it does

    @property
    def failed_groups(self) -> int:
        """Groups that came to nothing: each of their samples failed or ran out of time."""
        return int(self.figure("buffer", "failed_groups") or 0)

    def figure(self, service: str, name: str) -> float | None:
        """A figure that the processes of this service tell, summed over them; None when none does."""
        values = [s.figures[name] for s in self.services if s.service == service and name in s.figures]
        return sum(values) if values else None


def draw(snapshot: Snapshot, width: int) -> RenderableType:
    """The whole screen."""
    return Group(_title(snapshot), _progress(snapshot, width), _figures(snapshot, width), Text(),
                 services_table(snapshot, max(20, width - 62)), *_events(snapshot))


def line(snapshot: Snapshot) -> str:
    """The state of the run in one line."""
    m = snapshot.metrics
    parts = [f"step {m.step}/{snapshot.steps}", f"reward {number(m.mean('reward_mean'), 2)}",
             f"tokens/s {count(m.mean('tokens_per_s'))}", f"lag {number(m.mean('lag_mean'), 1)}",
             f"gap {number(m.mean('gap_mean'), 2, 'e')}"]
    if failures := m.last.get("score_failures"):
        reason = max(failures, key=lambda r: failures[r])
        parts.append(f"{sum(failures.values())} of {m.last.get('samples')} scores failed ({reason[:80]})")
    versions = [str(s.version) for s in snapshot.services if s.service == "rollout" and s.version]
    if versions:
        parts.append(f"versions {','.join(versions)}")
    if names := snapshot.metrics.last.get("alarms"):
        parts.append(f"alarms {','.join(names)}")
    if snapshot.failed_groups:
        parts.append(f"failed groups {snapshot.failed_groups}")
    if restarts := sum(s.restarts for s in snapshot.services):
        parts.append(f"restarts {restarts}")
    at = m.last.get("time_unix", time.time()) if snapshot.state in ("ended", "gone") else time.time()
    return f"{clock(at)} " + "  ".join(parts)


def alarms(snapshot: Snapshot) -> list[str]:
    """A sentence for each alarm of the trainer that is raised."""
    return [f"alarm {name}: {sentence}" for name, sentence in snapshot.metrics.last.get("alarms", {}).items()]


def waits_line(snapshot: Snapshot) -> str:
    """What every process waits for, in one line; for when there is no progress to tell."""
    waits = [f"{s.instance} {s.state}" + (f", waits {duration(s.waited_s)} for {s.waiting_for}" if s.waiting_for else "")
             for s in snapshot.services if s.service != "redis"]
    return f"{clock(time.time())} step {snapshot.metrics.step}/{snapshot.steps}  " + ("; ".join(waits) or snapshot.state)


def _title(snapshot: Snapshot) -> Text:
    text = Text.assemble(("slipstream ", "bold"), (snapshot.run, "bold cyan"), "  ", (snapshot.state, "italic"))
    text.append(f"  {duration(snapshot.elapsed_s)}", "dim")
    for sentence in alarms(snapshot):
        text.append(f"\n{sentence}", "bold yellow")
    return text.append(f"\nstalled: {snapshot.stall}", "bold red") if snapshot.stall else text


def _progress(snapshot: Snapshot, width: int) -> Table:
    step = snapshot.metrics.step
    per_step_s = None if snapshot.state == "ended" else snapshot.metrics.seconds_per_step
    rest = f"{duration((snapshot.steps - step) * per_step_s)} left at {1 / per_step_s:.2f} steps/s" if per_step_s else ""
    grid = Table.grid(padding=(0, 1))
    grid.add_row(f"step {step}/{snapshot.steps}", ProgressBar(snapshot.steps, step, width=max(20, min(60, width - 50))),
                 Text(rest, "dim"))
    return grid


def _figures(snapshot: Snapshot, width: int) -> Table:
    m = snapshot.metrics
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    target = f" of {snapshot.target_reward:g}" if snapshot.target_reward is not None else ""
    rewards = m.rewards
    curve = sparkline(rewards, max(10, min(60, width - 40)))
    reward = Text(f"{number(m.mean('reward_mean'), 3)}{target}  ", "bold").append(curve, "cyan")
    if rewards:
        reward.append(f"  {min(rewards):.2f} to {max(rewards):.2f}", "dim")
    grid.add_row("reward", reward)
    last = m.last
    works_s, waits_s = m.mean("step_s"), m.mean("wait_s")
    waits = percent(waits_s / (works_s + waits_s) if works_s and waits_s is not None else None)
    grid.add_row("speed", f"{count(m.mean('tokens_per_s'))} tokens/s, the trainer waits {waits} of the time")
    grid.add_row("lag", f"{number(last.get('lag_mean'), 2)} mean, {number(last.get('lag_max'), 0)} most, "
                 f"bound {snapshot.max_lag} steps")
    fresh = last.get("gap_fresh_max")
    grid.add_row("gap", f"{number(last.get('gap_mean'), 1, 'e')} mean, {number(last.get('gap_max'), 1, 'e')} most, of "
                 "|log-probability by sampler - by trainer|" + (f", {fresh:.1e} at equal weights" if fresh is not None else ""))
    grid.add_row("loss", f"{number(last.get('loss'), 4)}, gradient {number(last.get('grad_norm'), 3)}, "
                 f"entropy {number(last.get('entropy'), 3)}, clipped {percent(last.get('clip_share'))}")
    grid.add_row("buffer", _buffer(snapshot))
    return grid


def _buffer(snapshot: Snapshot) -> str:
    size, quota = snapshot.figure("buffer", "buffer_bytes"), snapshot.figure("buffer", "buffer_quota_bytes")
    full = "-" if size is None else f"{size / 1e6:.1f} MB" + (f" of {quota / 1e6:.0f}" if quota else "")
    return (f"{count(snapshot.figure('buffer', 'buffer_open_draws'))} draws open, "
            f"{count(snapshot.figure('buffer', 'buffer_outstanding_groups'))} outstanding, bodies {full}"
            + (f", {snapshot.failed_groups} groups failed" if snapshot.failed_groups else ""))


def services_table(snapshot: Snapshot, sentence: int | None = None) -> Table:
    """One row for each process; what it waits for is cut at `sentence` characters, or wrapped."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("process", "state", "version", "restarts", "since", "waits for"):
        table.add_column(column, no_wrap=column != "waits for")
    for s in snapshot.services:
        version = f"{s.version} (step {s.version_step})" if s.version else ""
        table.add_row(
            s.instance, Text(s.state, _STATE_STYLE.get(s.state, "")), version, str(s.restarts) if s.restarts else "",
            duration(s.waited_s) if s.waiting_for else "", shortened(s.waiting_for, sentence))
    return table


def _events(snapshot: Snapshot) -> list[RenderableType]:
    lines = [Text(f"{clock(at)} {event}", "yellow", no_wrap=True, overflow="ellipsis")
             for at, event in list(snapshot.events)[-EVENTS_SHOWN:]]
    return [Text(), *lines] if lines else []


def shortened(text: str, most: int | None) -> str:
    """The text, cut with an ellipsis when it is longer than `most` characters."""
    return text if most is None or len(text) <= most else text[:most - 1] + "…"


def clock(unix: float) -> str:
    """Local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(unix))


def duration(seconds: float) -> str:
    """12 s, 3:04 or 2:03:04."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def number(value: float | None, digits: int, form: str = "f") -> str:
    """A figure with fixed digits; - when there is none yet."""
    return "-" if value is None else f"{value:.{digits}{form}}"


def count(value: float | None) -> str:
    """A large figure with its SI prefix."""
    if value is None:
        return "-"
    for limit, prefix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if prefix == 'k' else limit):.1f}{prefix}"
    return f"{value:.0f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"

