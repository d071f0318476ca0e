"""The audit at the end of a run: was every draw accounted for, and nothing trained twice?

Judged from the trainer's own records, and only compared with what the ledger says it drew, at any one moment late in the run:

    <folder>/audit/trainer.jsonl   {"batch": 7, "incarnation": 1, "samples": [[draw, index, crc32c of the body, epoch, ...]]}
                                   one line per optimizer step, on disk before the step is published or kept
    <folder>/audit/versions.jsonl  {"version": 9, "step": 7, "incarnation": 2, ...}; an incarnation publishes first what it
                                   starts from, so its first line tells the step of the checkpoint that it went back to

A trainer that starts again goes back to a checkpoint: the steps after that are void, and those that it trains again replace
them. What is left is the surviving lineage. Whatever an incarnation trains that its weights already contain is a repeat.

repeated = samples trained twice in the surviving lineage, in two batches or one; or in a batch whose members changed
lost     = draws made that are neither trained, nor dropped by name, nor still open, nor in a batch that was numbered but not
           trained yet when the run was stopped
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.cli.metrics import parse

Sample = tuple[int, int]  # (draw, index)
Members = dict[Sample, tuple[int, ...]]  # what was trained of each sample: checksums of its body and of what entered the loss


@dataclass(frozen=True)
class Balance:
    """What the ledger says of its draws. made = dropped + open + numbered_batch * groups_per_batch when nothing is lost."""

    made: int
    dropped: int
    open: int  # not terminal and not in a batch
    numbered_batch: int
    groups_per_batch: int
    failed: int = 0  # of those dropped: each of their samples failed or ran out of time


@dataclass(frozen=True)
class Audit:
    """What was found. `lost` is None when the ledger could not be asked."""

    steps: int
    samples: int
    draws: int
    repeated: int
    lost: int | None

    @property
    def clean(self) -> bool:
        return self.repeated == 0 and self.lost == 0

    @property
    def sentence(self) -> str:
        """`lost 0, repeated 0`"""
        return f"lost {'unknown' if self.lost is None else self.lost}, repeated {self.repeated}"


@dataclass
class Lineage:
    """What the weights at the end contain. `complaints` name each thing that should not be, with its numbers."""

    batches: dict[int, Members] = field(default_factory=dict)
    incarnations: int = 0
    resumed: int = 0  # steps that were trained again on restored weights
    repeated: int = 0
    complaints: list[str] = field(default_factory=list)

    def complain(self, samples: int, sentence: str) -> None:
        self.repeated += samples
        self.complaints.append(sentence)


def audit(trained: Path, balance: Balance | None) -> Audit:
    """Compare the trainer's record with the ledger's balance."""
    found = lineage(trained)
    seen = {sample for members in found.batches.values() for sample in members}
    lost = None
    if balance is not None:  # batches above numbered_batch were still open, or not even drawn, when the balance was taken
        numbered = {draw for k, members in found.batches.items() if k <= balance.numbered_batch for draw, _ in members}
        untrained = max(0, balance.numbered_batch - max(found.batches, default=0)) * balance.groups_per_batch
        lost = abs(balance.made - len(numbered) - balance.dropped - balance.open - untrained)
    return Audit(len(found.batches), len(seen), len({draw for draw, _ in seen}), found.repeated, lost)


def lineage(trained: Path) -> Lineage:
    """The surviving lineage of a trainer's record; audit/versions.jsonl beside it is read, too, when it is there."""
    lines: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows(trained):
        if "samples" in row:
            lines.setdefault(row["incarnation"], []).append(row)
    starts: dict[int, int] = {}
    for row in rows(trained.with_name("versions.jsonl")):
        starts.setdefault(row["incarnation"], row["step"])
    found = Lineage(incarnations=len(starts.keys() | lines.keys()))
    void: dict[int, Members] = {}
    for incarnation in sorted(starts.keys() | lines.keys()):
        own = lines.get(incarnation, [])
        start = starts.get(incarnation, own[0]["batch"] - 1 if own else 0)
        for k in [k for k in found.batches if k > start]:
            void[k] = found.batches.pop(k)
        for row in own:
            _add(found, void, row)
    _draws_in_two_batches(found)
    return found


def _add(found: Lineage, void: Mapping[int, Members], row: Mapping[str, Any]) -> None:
    """One step on top of the lineage so far."""
    k, entries = row["batch"], row["samples"]
    members: Members = {(int(draw), int(index)): (int(crc), *more) for draw, index, crc, _, *more in entries}
    name = f"batch {k} by incarnation {row['incarnation']}"
    if len(members) < len(entries):
        found.complain(len(entries) - len(members), f"{name} has {len(entries) - len(members)} samples twice")
    if k in found.batches:
        found.complain(len(members), f"{name} was trained into weights that contained it already")
    elif k != max(found.batches, default=0) + 1:
        found.complaints.append(f"{name} follows batch {max(found.batches, default=0)}: steps between are missing")
    if (before := void.get(k)) is not None and before != members:
        changed = len(set(before.items()) ^ set(members.items()))
        found.complain(changed, f"{name} has other members or other data than when it was trained before: {changed} differ")
    found.resumed += before is not None
    found.batches[k] = members


def _draws_in_two_batches(found: Lineage) -> None:
    home: dict[int, int] = {}
    for k, members in sorted(found.batches.items()):
        for draw, index in sorted(members):
            if home.setdefault(draw, k) != k:
                found.complain(1, f"sample {index} of draw {draw} is in batch {k}, but the draw belongs to batch {home[draw]}")


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file of JSON objects; what a kill tore is no line. Nothing when there is no file."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        if (row := parse(line)) is not None:
            yield row
