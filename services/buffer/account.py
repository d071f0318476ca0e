"""LedgerService: the ledger's account of every draw, for people and audits; and its last state, kept in the object store."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format

from services.buffer.front import Front
from services.buffer.ledger import Ledger
from slipstream.balance import BALANCE_KEY
from slipstream.lifecycle import Clock
from slipstream.objects import ObjectStore
from slipstream.protos.buffer.v1 import ledger_pb2, ledger_pb2_grpc
from slipstream.telemetry import BufferMetrics


class LedgerServicer(ledger_pb2_grpc.LedgerServiceServicer):
    def __init__(self, front: Front, clock: Clock) -> None:
        self._front, self._clock = front, clock

    async def GetBalance(self, request: ledger_pb2.GetBalanceRequest, context: Any) -> ledger_pb2.GetBalanceResponse:
        return ledger_pb2.GetBalanceResponse(balance=await take(self._front, self._clock))

    async def ListDeadLetters(
            self, request: ledger_pb2.ListDeadLettersRequest, context: Any) -> ledger_pb2.ListDeadLettersResponse:
        lines = [line for line in await self._front.ledger.archive() if line["log"] == "dead"]
        return ledger_pb2.ListDeadLettersResponse(letters=[letter(line) for line in lines])


def letter(line: dict[str, Any]) -> ledger_pb2.DeadLetter:
    """A line of the dead-letter log."""
    return ledger_pb2.DeadLetter(
        id=line["id"], draw=line["draw"], index=line.get("index"), reason=line["reason"],
        environment=line.get("environment", ""), generated_tokens=line.get("generated_tokens", 0),
        ledger_epoch=line.get("epoch", 0))


async def take(front: Front, clock: Clock, leases: bool = True) -> ledger_pb2.Balance:
    """The balance now, with or without who holds leases. Raises Unavailable when Redis is away."""
    ledger: Ledger = front.ledger
    rules, holders = ledger.rules, await ledger.holders(leases)
    found, meta = holders.balance, holders.balance.meta
    balance = ledger_pb2.Balance(
        run=rules.run, ledger_epoch=meta.get("epoch", 0), sequence=meta.get("sequence", 0),
        incarnation=meta.get("incarnation", 0), draws=meta.get("next_draw", 0), lost_draws=meta.get("lost", 0),
        group_size=rules.group_size, groups_per_batch=rules.groups_per_batch, samples=found.samples, groups=found.groups,
        dropped=found.dropped, outstanding=meta["outstanding"], budget=(rules.max_lag + 1) * rules.groups_per_batch,
        bytes=meta.get("bytes", 0), reserved_bytes=meta.get("reserved", 0), quota_bytes=rules.quota_bytes,
        published_step=meta.get("published", -1), numbered_batch=meta.get("numbered", 0),
        committed_batch=meta.get("committed", 0), low_water_mark=holders.low_water_mark,
        sample_leases=holders.sample_leases, scoring_leases=holders.scoring_leases,
        expired={"sample": meta.get("expired", 0), "scoring": meta.get("scoring_expired", 0)},
        rejected=_rejected(front.metrics))
    balance.taken.FromMicroseconds(int(clock.unix() * 1e6))
    return balance


async def keep(front: Front, clock: Clock, store: ObjectStore, leases: bool = True) -> None:
    """Put the balance where `slipstream ledger` finds it after the run."""
    balance = json_format.MessageToJson(await take(front, clock, leases), preserving_proto_field_name=True)
    await store.put(BALANCE_KEY, balance.encode())


def _rejected(metrics: BufferMetrics) -> dict[str, int]:
    """Refused items by reason, from the counter of this process."""
    return {
        sample.labels["reason"]: int(sample.value) for family in metrics.rejected.collect() for sample in family.samples
        if sample.name.endswith("_total")}
