"""What the trainer writes into the run folder: metrics, one line a step, and the record that an auditor judges it by.

    <folder>/metrics.jsonl        {"step": 7, "reward_mean": 0.31, ...}; steps only grow: a resume cuts what is to be repeated;
                                  a figure that is not finite is null: JSON has no other word for it
    <folder>/audit/trainer.jsonl  {"batch": 7, "incarnation": 2, "samples": [[draw, index, body crc32c, ledger epoch,
                                  crc32c of the arrays in the loss], ...]}; on disk before the step is published or kept. Lines
                                  are never removed, so a repeated step appears again, with the same samples and a higher
                                  incarnation
    <folder>/audit/versions.jsonl {"version": 7, "step": 7, "incarnation": 2, "weights": "<SHA-256>"}; one line a published
                                  version, before it is announced; it outlives the version, and replay compares it
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from slipstream.errors import ConfigError
from slipstream.protos.types.v1 import policy_pb2

AuditEntry = tuple[int, int, int, int, int]


class Records:
    """Append-only files below a run folder. Raises ConfigError when it cannot be written."""

    def __init__(self, folder: Path) -> None:
        self.metrics_path = folder / "metrics.jsonl"
        self.audit_path = folder / "audit" / "trainer.jsonl"
        self.versions_path = folder / "audit" / "versions.jsonl"
        try:
            self.audit_path.parent.mkdir(parents=True, exist_ok=True)
            self._audit = self.audit_path.open("ab+")
            self._metrics = self.metrics_path.open("ab")
        except OSError as error:
            raise ConfigError(f"run.folder = {str(folder)!r} cannot be written: {error.strerror}; set another") from error
        _end_torn_line(self._audit)
        with self.versions_path.open("ab+") as versions:
            _end_torn_line(versions)

    def resume(self, step: int) -> list[dict[str, Any]]:
        """Cut metrics lines above `step` and torn ones; returns those that stay."""
        kept = []
        for line in self.metrics_path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and entry.get("step", step + 1) <= step:
                kept.append(entry)
        self._metrics.close()
        temporary = self.metrics_path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        temporary.replace(self.metrics_path)
        self._metrics = self.metrics_path.open("ab")
        return kept

    def metrics(self, entry: dict[str, Any]) -> None:
        """Append one step's line; readers see whole lines only. What is not finite, at any depth, is written as null."""
        self._metrics.write((json.dumps(_finite(entry), allow_nan=False) + "\n").encode())
        self._metrics.flush()

    def audit(self, batch: int, incarnation: int, samples: Sequence[AuditEntry]) -> None:
        """Append the record of a batch and wait until it is on the disk."""
        line = json.dumps({"batch": batch, "incarnation": incarnation, "samples": samples}, separators=(",", ":"))
        self._audit.write(line.encode() + b"\n")
        self._audit.flush()
        os.fsync(self._audit.fileno())

    def version(self, version: policy_pb2.PolicyVersion, weights: str) -> None:
        """Append the record of a published version; `weights` is slipstream.manifest.weights_hash of its manifest.

        Also after `close`: a publication may outlive the loop.
        """
        line = json.dumps({
            "version": version.number, "step": version.step, "incarnation": version.incarnation, "weights": weights})
        with self.versions_path.open("ab") as file:
            file.write(line.encode() + b"\n")

    def close(self) -> None:
        self._audit.close()
        self._metrics.close()


def _finite(value: Any) -> Any:
    """The same figures, None for those that JSON cannot say."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _end_torn_line(file: BinaryIO) -> None:
    """A predecessor that was killed in the middle of a line left it without an end."""
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.write(b"\n")
