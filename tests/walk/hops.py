"""The seven hops, each the least that a service has to do. The tests beside this file play them in order.

What services add to this are loops, time limits and retries: services/rollout/worker.py, services/reward/worker.py and
services/trainer/loop.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.reward.scorers import Scorers
from services.rollout.codec import Codec
from services.rollout.episode import Episode
from services.rollout.torch_engine import TorchEngine
from services.trainer.batches import TrainingBatch, assemble
from services.trainer.checkpoint import Checkpoints, Header
from services.trainer.learner import Learner
from slipstream.config import RunFile
from slipstream.environment import EpisodeReset, EpisodeStep, Reset, Step, Task
from slipstream.environments.client import EnvironmentClient
from slipstream.manifest import RawTensor, read_files, read_manifest, read_tensors, write_version
from slipstream.objects import ObjectStore
from slipstream.protos.buffer.v1.samples_pb2 import SampleLease, SubmittedSample
from slipstream.protos.buffer.v1.scores_pb2 import ScoredSample
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.protos.types.v1.sample_pb2 import Score, Transcript
from tests.buffer_client import Client


@dataclass
class Walk:
    """One run, and everybody who takes part in it."""

    run: RunFile
    buffer: Client
    store: ObjectStore
    environment: EnvironmentClient
    engine: TorchEngine
    scorers: Scorers
    learner: Learner


async def lease(walk: Walk) -> list[SampleLease]:
    """Hop 1: all the samples that there is a budget for."""
    return list((await walk.buffer.lease()).leases)


async def roll_out(walk: Walk, leases: list[SampleLease]) -> list[SubmittedSample]:
    """Hop 2: observation → prompt → answer → action → sample. The engine batches whatever is asked of it at once."""
    codec, rollout = Codec(walk.engine.tokenizer, walk.engine.stop_token_ids), walk.run.rollout
    episodes = [Episode(lease, codec, rollout.max_new_tokens, rollout.context) for lease in leases]
    names = [f"{e.draw}-{e.lease.lease.sample.index}" for e in episodes]
    resets = await walk.environment.reset([
        EpisodeReset(name, Task(e.lease.task.index, e.lease.task.seed)) for name, e in zip(names, episodes, strict=True)])
    for episode, reset in zip(episodes, resets, strict=True):
        assert isinstance(reset, Reset)
        episode.begin(reset)
    generations = await asyncio.gather(*(walk.engine.generate(e.request()) for e in episodes))
    actions = [e.answered(generation) for e, generation in zip(episodes, generations, strict=True)]
    steps = await walk.environment.step([
        EpisodeStep(name, 1, action) for name, action in zip(names, actions, strict=True)])
    for episode, step in zip(episodes, steps, strict=True):
        assert isinstance(step, Step) and step.done
        episode.stepped(step)
    return [e.submission() for e in episodes]


async def score(walk: Walk) -> list[tuple[Transcript, Score]]:
    """Hop 3: what the environment did not score itself."""
    samples = await walk.buffer.lease_unscored()
    transcripts = [Transcript.FromString(s.transcript) for s in samples]
    scores: dict[int, Score] = {}
    await walk.scorers.score(transcripts, lambda i, score, seconds: scores.update({i: score}))
    statuses = await walk.buffer.submit_scores(ScoredSample(lease=s.lease, score=scores[i]) for i, s in enumerate(samples))
    assert not any(status.code for status in statuses)
    return [(t, scores[i]) for i, t in enumerate(transcripts)]


async def read_batch(walk: Walk, k: int) -> TrainingBatch:
    """Hop 4: the composition, then the bodies that it names."""
    batch = (await walk.buffer.batch(k)).batch
    bodies = await walk.buffer.read(k)
    epoch = batch.groups[0].draw.ledger_epoch
    return assemble(batch, {(epoch, *sample): body for sample, body in bodies.items()})


async def publish(walk: Walk, step: int) -> PolicyVersion:
    """Hop 5: a number, the tensors, the manifest, the event; in this order."""
    number = await walk.buffer.reserve(step)
    version = await write(walk, number, step)
    await walk.buffer.announce(version)
    return version


async def write(walk: Walk, number: int, step: int) -> PolicyVersion:
    """The part of hop 5 that goes to the object store."""
    return await write_version(
        walk.store, run=walk.run.run.name, number=number, step=step, incarnation=walk.buffer.incarnation,
        tensors=walk.learner.weights(), files=walk.learner.files())


async def commit(walk: Walk, checkpoints: Checkpoints, batch: TrainingBatch) -> Header:
    """Hop 6: a checkpoint that was read back, then the ledger rows that it covers."""
    header = await checkpoints.save(
        walk.learner.snapshot(), step=batch.number, incarnation=walk.buffer.incarnation, ledger_sequence=batch.ledger_sequence)
    await walk.buffer.commit(batch.number, header.manifest_key)
    return header


async def fetch(walk: Walk, version: PolicyVersion) -> list[RawTensor]:
    """Hop 7: manifest and tensors, every byte checked before anybody sees it. What is left is `engine.swap`."""
    return await read_tensors(walk.store, await read_manifest(walk.store, version, walk.run.run.name))


async def start_engine(walk: Walk, version: PolicyVersion) -> None:
    """Hop 7 for the first time: the version also says which model to build."""
    files = await read_files(walk.store, await read_manifest(walk.store, version, walk.run.run.name))
    await walk.engine.start(files, await fetch(walk, version), version)


async def up_to_batch(walk: Walk, k: int) -> TrainingBatch:
    """Hops 1 to 4 for whoever is interested in what comes after them."""
    await walk.buffer.submit(*await roll_out(walk, await lease(walk)))
    await score(walk)
    return await read_batch(walk, k)
