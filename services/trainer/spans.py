"""The trainer's part of a sample's trace: the step that trained it, and the version that came of it. See slipstream.tracing."""

from __future__ import annotations

from collections.abc import Sequence

from services.trainer.records import AuditEntry
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.tracing import Tracer

Sample = tuple[int, int, int]  # ledger epoch, draw, sample


class StepSpans:
    """Does nothing without a tracer. A step that no version covers (the run ended) has no `publish`."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer
        self._trained: list[tuple[int, list[Sample]]] = []  # by step, until a version covers it

    def trained(self, step: int, samples: Sequence[AuditEntry], seconds: float, incarnation: int) -> None:
        """A step ended that took so long. `samples` as the auditor has them: (draw, sample, ..., ledger epoch, ...)."""
        if self._tracer is not None:
            keys = [(epoch, draw, sample) for draw, sample, _, epoch, _ in samples]
            ended = self._tracer.now()
            self._tracer.hop("train", keys, ended - int(seconds * 1e9), ended, step=step, incarnation=incarnation)
            self._trained.append((step, [key for key in keys if self._tracer.traced(*key)]))

    def published(self, version: PolicyVersion | None, seconds: float) -> None:
        """A version was announced, so long after its writing began."""
        if self._tracer is not None and version is not None:
            ended = self._tracer.now()
            while self._trained and self._trained[0][0] <= version.step:
                step, keys = self._trained.pop(0)
                self._tracer.hop(
                    "publish", keys, ended - int(seconds * 1e9), ended, step=step, version=version.number)
