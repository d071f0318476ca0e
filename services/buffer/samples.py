"""SampleService: hops 1 and 2.

Consumes: LeaseSamples, HeartbeatSamples, SubmitSamples, SubmitPartials, ReleaseSamples of rollout workers.
Produces: leases; samples in the ledger, unscored or scored.
Waits for: something to lease (long poll). Unblocked by: a published version, a numbered or committed batch, a lease given
back or lapsed, a dropped group, the end of the wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from google.protobuf import duration_pb2

from services.buffer.boundary import checked_partial, checked_sample
from services.buffer.fold import Fold
from services.buffer.front import OK, Front, TaskSeeds, from_lease, require, shielded, to_lease
from services.buffer.ledger import Granted, Outcome, Submit
from services.buffer.sentences import lease_sentence
from slipstream import rpc, seeds
from slipstream.errors import Fenced, SlipstreamError
from slipstream.protos.buffer.v1 import samples_pb2, samples_pb2_grpc

_MOST_SAMPLES = 4096


class SampleServicer(samples_pb2_grpc.SampleServiceServicer):
    def __init__(self, front: Front) -> None:
        self._front = front
        self._submit: Fold[Submit, Outcome] = Fold(
            front.ledger.submit_samples, lambda s: len(s.body) + len(s.transcript) + len(s.score))
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
            "samples", rpc.seconds(request.wait), attempt, lambda g: g.grants or g.finished)
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
        run_seed, task_seeds = front.ledger.rules.seed, TaskSeeds(front.ledger.rules.seed)
        for grant in granted.grants:
            draw, out = grant.lease.draw, response.leases.add(
                group_size=grant.group_size, min_step=grant.min_step, partial=grant.partial,
                seed=seeds.sample_seed(run_seed, grant.lease.draw, grant.lease.sample))
            from_lease(out.lease, grant.lease)
            task = out.task
            task.environment, task.index = grant.environment, grant.task_index
            task.seed = task_seeds.of(grant.environment, draw)
            if grant.pinned_version and (version := self._version(grant.pinned_version)):
                out.pinned_version.CopyFrom(version)
        return response

    def _version(self, number: int) -> Any:
        return next((v for v in self._front.versions if v.number == number), None)

    async def HeartbeatSamples(
            self, request: samples_pb2.HeartbeatSamplesRequest, context: Any) -> samples_pb2.HeartbeatSamplesResponse:
        leases = [to_lease(wire) for wire in request.leases]
        self._front.hear("rollout", request.worker)
        self._front.leases_kept = self._front.heard["rollout"][request.worker]
        outcomes = await self._front.ledger.heartbeat_samples(leases) if leases else []
        return samples_pb2.HeartbeatSamplesResponse(
            statuses=[self._front.status(o, lease) for o, lease in zip(outcomes, leases, strict=True)])

    async def ReleaseSamples(
            self, request: samples_pb2.ReleaseSamplesRequest, context: Any) -> samples_pb2.ReleaseSamplesResponse:
        leases = [to_lease(wire) for wire in request.leases]
        outcomes = await shielded(self._front.ledger.release_samples(leases)) if leases else []
        return samples_pb2.ReleaseSamplesResponse(
            statuses=[self._front.status(o, lease, outdated_is_ok=True) for o, lease in zip(outcomes, leases, strict=True)])

    async def SubmitSamples(self, request: samples_pb2.SubmitSamplesRequest, context: Any) -> samples_pb2.SubmitSamplesResponse:
        front, response = self._front, samples_pb2.SubmitSamplesResponse()
        submits: list[Submit] = []
        for wire in request.samples:
            result = response.results.add()
            try:
                submits.append(checked_sample(wire))
            except SlipstreamError as error:
                result.status.CopyFrom(front.rejected(error))
        outcomes: Sequence[Outcome] = await self._submit(submits)
        accepted = (result for result in response.results if not result.status.code)
        for result, submit, outcome in zip(accepted, submits, outcomes, strict=True):
            if outcome is Outcome.ACCEPTED:
                result.outcome = samples_pb2.OUTCOME_ACCEPTED
            elif outcome is Outcome.OUTDATED:
                result.outcome = samples_pb2.OUTCOME_OUTDATED
            else:
                result.status.CopyFrom(front.status(outcome, submit.lease))
        counts = Counter("failed" if s.failure and o is Outcome.ACCEPTED else o for s, o in zip(submits, outcomes, strict=True))
        for outcome, count in counts.items():
            front.metrics.samples.labels(outcome).inc(count)
        return response

    async def SubmitPartials(
            self, request: samples_pb2.SubmitPartialsRequest, context: Any) -> samples_pb2.SubmitPartialsResponse:
        front, partials, statuses = self._front, [], []
        for wire in request.partials:
            try:
                partials.append(checked_partial(wire))
                statuses.append(OK)
            except SlipstreamError as error:
                statuses.append(front.rejected(error))
        outcomes = iter(await shielded(front.ledger.submit_partials(partials)) if partials else [])
        leases = iter(partials)
        return samples_pb2.SubmitPartialsResponse(
            statuses=[s if s.code else front.status(next(outcomes), next(leases).lease) for s in statuses])
