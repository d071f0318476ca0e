"""The auditor of a chaos run. Takes nobody's word for what became of a sample, the ledger's least of all.

Evidence, all of it written by those who acted, at the time:

    audit/rollout-*.jsonl          what the buffer acknowledged to a worker: draw, sample, attempt, checksum of the body
    audit/trainer.jsonl            what entered the loss of each step (slipstream/cli/audit.py)
    audit/versions.jsonl           which checkpoint each incarnation went back to
    objects/ledger/*.jsonl         dead letters: what was dropped, by name, archived before it was trimmed

Every acknowledged sample was trained exactly once in the surviving lineage, with the body that was acknowledged; or it was
dropped by name; or it is still open, which nothing is once the run has finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.cli.audit import Sample, lineage, rows


@dataclass
class Judgement:
    """What was found. `complaints` are sentences; each thing lost or repeated has one, and so has missing evidence."""

    batches: int = 0
    trained: int = 0  # samples in the surviving lineage
    acknowledged: int = 0  # samples
    dropped: int = 0  # acknowledged samples that were dropped by name
    incarnations: int = 0
    resumed: int = 0  # steps that were trained again on restored weights
    lost: int = 0
    repeated: int = 0
    complaints: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.repeated or self.complaints)


def judge(folder: Path, dead: Iterable[Mapping[str, Any]], opened: Iterable[int] = ()) -> Judgement:
    """Judge a run folder. `dead`: dead letters that are not archived yet; `opened`: draws that are still open."""
    found = lineage(folder / "audit" / "trainer.jsonl")
    trained = {sample: crcs for members in found.batches.values() for sample, crcs in members.items()}
    judgement = Judgement(
        batches=len(found.batches), trained=len(trained), incarnations=found.incarnations, resumed=found.resumed,
        repeated=found.repeated, complaints=list(found.complaints))
    acknowledged = _acknowledged(folder)
    judgement.acknowledged = len(acknowledged)
    if not acknowledged or not trained:
        judgement.complaints.append(f"no evidence: {len(acknowledged)} samples acknowledged, {len(trained)} trained")
    draws, samples = _dropped(folder, dead)
    still_open = set(opened)
    for sample, crcs in sorted(acknowledged.items()):
        if sample[0] in draws or sample in samples:
            judgement.dropped += 1
            continue
        if sample[0] in still_open:
            continue
        if sentence := _lost(sample, crcs, trained.get(sample)):
            judgement.lost += 1
            judgement.complaints.append(sentence)
    return judgement


def _lost(sample: Sample, crcs: set[int], trained: tuple[int, ...] | None) -> str:
    """Why an acknowledged sample is lost; empty when it is not."""
    name = f"sample {sample[1]} of draw {sample[0]}"
    if trained is None:
        return f"{name} was acknowledged, but neither trained nor dropped by name"
    if crcs - {trained[0]}:
        return f"{name} was acknowledged with another body than the one that was trained"
    return ""


def _acknowledged(folder: Path) -> dict[Sample, set[int]]:
    """Checksums of the acknowledged bodies of each sample; empty for a failed episode, which has none."""
    found: dict[Sample, set[int]] = {}
    for path in sorted((folder / "audit").glob("rollout-*.jsonl")):
        for row in rows(path):
            crcs = found.setdefault((row["draw"], row["sample"]), set())
            if "crc" in row:
                crcs.add(row["crc"])
    return found


def _dropped(folder: Path, dead: Iterable[Mapping[str, Any]]) -> tuple[set[int], set[Sample]]:
    """Draws and samples with a dead letter."""
    archived = (row for path in sorted((folder / "objects" / "ledger").glob("*.jsonl")) for row in rows(path))
    draws: set[int] = set()
    samples: set[Sample] = set()
    for letter in (*archived, *dead):
        if letter.get("log") == "dead" and letter.get("reason"):
            if "index" in letter:
                samples.add((letter["draw"], letter["index"]))
            else:
                draws.add(letter["draw"])
    return draws, samples


def weights(folder: Path) -> dict[int, set[str]]:
    """Hashes of the published weights by step; a step that was trained several times has several lines."""
    found: dict[int, set[str]] = {}
    for row in rows(folder / "audit" / "versions.jsonl"):
        found.setdefault(row["step"], set()).add(row["weights"])
    return found


def different_weights(disturbed: Path, undisturbed: Path) -> list[str]:
    """Where two runs of a pinned schedule differ: each step that both published. Says so when they end at different steps."""
    one, other = weights(disturbed), weights(undisturbed)
    if not one or not other or max(one) != max(other):
        return [f"published up to step {max(one, default=None)} and {max(other, default=None)}: nothing to compare"]
    return [f"the weights of step {k} differ from those of the undisturbed run" for k in sorted(one.keys() & other.keys())
            if len(one[k] | other[k]) > 1]
