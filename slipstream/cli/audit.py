"""The audit at the end of a run: was every draw accounted for, and nothing trained twice?

Judged from the trainer's own record, <folder>/audit/trainer.jsonl, one line per optimizer step:

    {"batch": 7, "incarnation": 1, "samples": [[draw, index, crc32c of the body, ledger epoch], ...]}

and only compared with what the ledger says it drew, at any one moment late in the run. A step that is trained again by a
later incarnation replaces its earlier line: the weights went back to the checkpoint before it.

repeated = samples trained in two different batches, or in a batch whose members changed between incarnations
lost     = draws made that are neither trained, nor dropped by name, nor still open, nor in a batch that was numbered but not
           trained yet when the run was stopped
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.cli.metrics import parse

Sample = tuple[int, int]  # (draw, index)


@dataclass(frozen=True)
class Balance:
    """What the ledger says of its draws. made = dropped + open + numbered_batch * groups_per_batch when nothing is lost."""

    made: int
    dropped: int
    open: int  # not terminal and not in a batch
    numbered_batch: int
    groups_per_batch: int


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


def audit(trained: Path, balance: Balance | None) -> Audit:
    """Compare the trainer's record with the ledger's balance."""
    batches, changed = _batches(trained)
    seen: dict[Sample, int] = {}
    repeated = changed
    for k, members in sorted(batches.items()):
        for sample in members:
            if seen.setdefault(sample, k) != k:
                repeated += 1
    draws = len({draw for draw, _ in seen})
    lost = None
    if balance is not None:  # batches above numbered_batch were still open, or not even drawn, when the balance was taken
        numbered = {draw for k, members in batches.items() if k <= balance.numbered_batch for draw, _ in members}
        untrained = max(0, balance.numbered_batch - max(batches, default=0)) * balance.groups_per_batch
        lost = abs(balance.made - len(numbered) - balance.dropped - balance.open - untrained)
    return Audit(len(batches), len(seen), draws, repeated, lost)


def _batches(trained: Path) -> tuple[dict[int, dict[Sample, int]], int]:
    """Members with their checksums by batch, the last line of each batch, and how many differ from an earlier line."""
    batches: dict[int, dict[Sample, int]] = {}
    changed = 0
    try:
        lines = trained.read_bytes().splitlines()
    except FileNotFoundError:
        return {}, 0
    for line in lines:
        if (row := parse(line)) is None or "samples" not in row:  # torn by a kill; the step is trained again
            continue
        members = {(int(draw), int(index)): int(crc) for draw, index, crc, *_ in row["samples"]}
        changed += len(row["samples"]) - len(members)
        if (before := batches.get(row["batch"])) is not None and before != members:
            changed += len(set(before.items()) ^ set(members.items()))
        batches[row["batch"]] = members
    return batches, changed
