"""The evidence of a rollout worker: what the buffer acknowledged, line by line."""

from __future__ import annotations

import json
from pathlib import Path

from services.rollout.evidence import Evidence
from slipstream.protos.buffer.v1.samples_pb2 import SubmittedSample
from slipstream.protos.types.v1.sample_pb2 import DrawId, Lease, SampleId


def submission(draw: int, **values: object) -> SubmittedSample:
    lease = Lease(sample=SampleId(draw=DrawId(ledger_epoch=1, number=draw), index=3), attempt=2)
    return SubmittedSample(lease=lease, **values)  # pyright: ignore


def test_a_line_names_what_was_acknowledged(tmp_path: Path) -> None:
    """Draw, sample, attempt, epoch and checksum; of a failed episode the failure. A torn line is ended."""
    path = tmp_path / "audit" / "rollout-1.jsonl"
    path.parent.mkdir()
    path.write_text('{"draw": 1, "sam')
    evidence = Evidence(tmp_path, "rollout-1")
    evidence.accepted(submission(7, crc32c=99))
    evidence.accepted(submission(8, failure="broke"))
    lines = path.read_text().splitlines()
    assert lines[0] == '{"draw": 1, "sam'
    assert [json.loads(line) for line in lines[1:]] == [
        {"draw": 7, "sample": 3, "attempt": 2, "epoch": 1, "crc": 99},
        {"draw": 8, "sample": 3, "attempt": 2, "epoch": 1, "failure": "broke"}]
