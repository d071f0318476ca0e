"""What a rollout worker was told, for an auditor who does not take the ledger's word: service.audit = true.

    <folder>/audit/<instance>.jsonl  {"draw": 401, "sample": 3, "attempt": 1, "epoch": 1, "crc": 3735928559}, one line for each
                                     sample whose submit was acknowledged as accepted; "failure" instead of "crc" when the
                                     episode had failed

A kill between the acknowledgement and the line loses a line, never adds one: the auditor then asks for less, not for too much.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from slipstream.protos.buffer.v1.samples_pb2 import SubmittedSample


class Evidence:
    """Append-only record of one worker."""

    def __init__(self, folder: Path, instance: str) -> None:
        path = folder / "audit" / f"{instance}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(self._file, b"\n")  # ends what a predecessor was killed in the middle of

    def accepted(self, submission: SubmittedSample) -> None:
        """The buffer has said that it holds this sample."""
        lease = submission.lease
        line = {
            "draw": lease.sample.draw.number, "sample": lease.sample.index, "attempt": lease.attempt,
            "epoch": lease.sample.draw.ledger_epoch}
        line |= {"failure": submission.failure} if submission.failure else {"crc": submission.crc32c}
        os.write(self._file, json.dumps(line).encode() + b"\n")
