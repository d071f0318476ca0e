"""SampleService: hops 1 and 2.

Consumes: LeaseSamples, HeartbeatSamples, SubmitSamples, StreamSamples, SubmitPartials, ReleaseSamples of rollout workers.
Produces: leases; samples in the ledger, unscored or scored.
Waits for: something to lease (long poll). Unblocked by: a published version, a numbered or committed batch, a lease given
back or lapsed, a dropped group, the end of the wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from services.buffer.boundary import checked_partial, checked_sample
from services.buffer.fold import Fold
from services.buffer.frames import answered
from services.buffer.front import Front, from_lease, require, shielded, to_lease
from services.buffer.ledger import Grant, Granted, Outcome, Submit
from services.buffer.sentences import lease_sentence
from services.buffer.spill import Spill
from services.buffer.wire import Submitted, submitted
from slipstream import rpc, seeds
from slipstream.errors import Fenced, InvalidInput, SlipstreamError
from slipstream.objects import ObjectStore
from slipstream.protos.buffer.v1 import samples_pb2, samples_pb2_grpc

_MOST_SAMPLES = 4096
_ACCEPTED = samples_pb2.SubmitResult(outcome=samples_pb2.OUTCOME_ACCEPTED)
_OUTDATED = samples_pb2.SubmitResult(outcome=samples_pb2.OUTCOME_OUTDATED)


class SampleServicer(samples_pb2_grpc.SampleServiceServicer):
    def __init__(self, front: Front, store: ObjectStore) -> None:
        self._front = front
        self._submit: Fold[Submit, Outcome] = Fold(
            Spill(front.ledger, store, front.metrics.spilled).submit, lambda s: len(s.body) + len(s.transcript) + len(s.score))
        self._ttl: duration_pb2.Duration = rpc.duration(front.ledger.rules.lease_ms / 1000)

    async def LeaseSamples(self, request: samples_pb2.LeaseSamplesRequest, context: Any) -> samples_pb2.LeaseSamplesResponse:
        front = self._front
        require(bool(request.worker), "worker", request.worker, "name the worker, for logs and for those who wait for it")
        require(request.max_samples > 0, "max_samples", request.max_samples, "ask for at least one")
        if request.run_file_hash and front.run_hash and request.run_file_hash != front.run_hash:
            raise Fenced(
                f"the run file of worker {request.worker} (hash {request.run_file_hash[:12]}) is not that of the buffer "
                f"({front.run_hash[:12]}): start both from one run file", "RUN_FILE_HASH")
        count = min(request.max_samples, _MOST_SAMPLES)
        front.hear("rollout", request.worker)

        async def attempt() -> Granted:
            granted = await front.ledger.grant_samples(request.worker, count, request.loaded_version)
            if granted.waiting:
                front.waiting["rollout"] = lease_sentence(granted.waiting, front.ledger.rules)
            return granted

        granted = await front.changes.poll(
            "samples", rpc.seconds(request.wait), attempt, lambda g: g.grants or g.finished,
            last=lambda g: len(g.grants) < count)
        if granted.grants:
            front.waiting.pop("rollout", None)
        return await self._leases(granted)

    async def _leases(self, granted: Granted) -> samples_pb2.LeaseSamplesResponse:
        front = self._front
        await front.refresh_versions()
        if any(g.pinned_version and self._version(g.pinned_version) is None for g in granted.grants):
            await front.refresh_versions(force=True)
        response = samples_pb2.LeaseSamplesResponse(
            ttl=self._ttl, newest_version=front.newest, finished=granted.finished and not granted.grants)
        if granted.waiting:
            response.waiting_for = lease_sentence(granted.waiting, front.ledger.rules)
        one, draw = samples_pb2.SampleLease(), -1  # filled once for a draw, copied for each of its samples
        sample_seeds: list[int] = []
        for grant in granted.grants:
            lease = grant.lease
            if lease.draw != draw:
                draw, one = lease.draw, self._of_draw(grant)
                sample_seeds = seeds.sample_seeds(front.ledger.rules.seed, draw, grant.group_size)
            one.lease.attempt, one.lease.sample.index = lease.attempt, lease.sample
            one.seed, one.partial = sample_seeds[lease.sample], grant.partial
            response.leases.append(one)
        return response

    def _of_draw(self, grant: Grant) -> samples_pb2.SampleLease:
        """What the leases of a draw have in common."""
        one = samples_pb2.SampleLease(group_size=grant.group_size, min_step=grant.min_step, task=self._front.task(grant))
        from_lease(one.lease, grant.lease)
        if grant.pinned_version and (version := self._version(grant.pinned_version)):
            one.pinned_version.CopyFrom(version)
        return one

    def _version(self, number: int) -> Any:
        return next((v for v in self._front.versions if v.number == number), None)

    async def HeartbeatSamples(
            self, request: samples_pb2.HeartbeatSamplesRequest, context: Any) -> samples_pb2.HeartbeatSamplesResponse:
        leases = [to_lease(wire) for wire in request.leases]
        self._front.hear("rollout", request.worker)
        self._front.leases_kept = self._front.heard["rollout"][request.worker]
        outcomes = await self._front.ledger.heartbeat_samples(leases) if leases else []
        return samples_pb2.HeartbeatSamplesResponse(statuses=self._front.statuses(outcomes, leases))

    async def ReleaseSamples(
            self, request: samples_pb2.ReleaseSamplesRequest, context: Any) -> samples_pb2.ReleaseSamplesResponse:
        leases = [to_lease(wire) for wire in request.leases]
        outcomes = await shielded(self._front.ledger.release_samples(leases)) if leases else []
        return samples_pb2.ReleaseSamplesResponse(
            statuses=self._front.statuses(outcomes, leases, outdated_is_ok=True))

    async def SubmitSamples(  # pyright: ignore[reportIncompatibleMethodOverride]  # the request as wire.py reads it
            self, request: Submitted, context: Any) -> samples_pb2.SubmitSamplesResponse:
        return samples_pb2.SubmitSamplesResponse(results=await self._results(request))

    async def StreamSamples(  # pyright: ignore[reportIncompatibleMethodOverride]  # requests as bytes
            self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[samples_pb2.StreamSamplesResponse]:
        """Frames are checked as they come and stored together with whatever else is there; answers keep their order."""
        async with contextlib.aclosing(answered(requests, self._frame)) as answers:
            async for results in answers:
                yield samples_pb2.StreamSamplesResponse(results=results)

    async def _frame(self, data: bytes) -> list[samples_pb2.SubmitResult]:
        try:
            request = submitted(data)
        except DecodeError as error:
            raise InvalidInput(f"StreamSamples: a frame is no StreamSamplesRequest: {error}", "MESSAGE") from None
        return await self._results(request)

    async def _results(self, request: Submitted) -> list[samples_pb2.SubmitResult]:
        """Check and store; one result for each sample."""
        submits: list[Submit] = []
        refused: dict[int, samples_pb2.SubmitResult] = {}
        for n, (wire, body) in enumerate(request.samples):
            try:
                submits.append(checked_sample(wire, body))
            except SlipstreamError as error:
                refused[n] = samples_pb2.SubmitResult(status=self._front.rejected(error))
        outcomes = await self._submit(submits)
        self._count(submits, outcomes)
        if not refused and outcomes.count(Outcome.ACCEPTED) == len(submits):
            return [_ACCEPTED] * len(submits)
        given = iter(map(self._result, outcomes, submits))
        return [refused[n] if n in refused else next(given) for n in range(len(request.samples))]

    def _result(self, outcome: Outcome, submit: Submit) -> samples_pb2.SubmitResult:
        if outcome is Outcome.ACCEPTED:
            return _ACCEPTED
        if outcome is Outcome.OUTDATED:
            return _OUTDATED
        return samples_pb2.SubmitResult(status=self._front.status(outcome, submit.lease))

    def _count(self, submits: Sequence[Submit], outcomes: Sequence[Outcome]) -> None:
        failed = sum(1 for s, o in zip(submits, outcomes, strict=True) if s.failure and o is Outcome.ACCEPTED)
        for outcome in Outcome:
            if count := outcomes.count(outcome) - (failed if outcome is Outcome.ACCEPTED else 0):
                self._front.metrics.samples.labels(outcome).inc(count)
        if failed:
            self._front.metrics.samples.labels("failed").inc(failed)

    async def SubmitPartials(
            self, request: samples_pb2.SubmitPartialsRequest, context: Any) -> samples_pb2.SubmitPartialsResponse:
        front, partials = self._front, []
        refused: dict[int, status_pb2.Status] = {}
        for n, wire in enumerate(request.partials):
            try:
                partials.append(checked_partial(wire))
            except SlipstreamError as error:
                refused[n] = front.rejected(error)
        outcomes = await shielded(front.ledger.submit_partials(partials)) if partials else []
        statuses = front.statuses(outcomes, [p.lease for p in partials])
        for n in sorted(refused):
            statuses.insert(n, refused[n])
        return samples_pb2.SubmitPartialsResponse(statuses=statuses)
