"""Hop 5: the weights after step k become a policy version, and with it the next samples may be drawn."""

from __future__ import annotations

import torch

from slipstream import rpc
from slipstream.manifest import read_manifest, read_tensors
from slipstream.model import cooked
from slipstream.protos.buffer.v1 import policy_pb2
from tests.walk.hops import Walk, lease, publish, up_to_batch, write


async def test_first_the_number_then_the_tensors_then_the_event(walk: Walk) -> None:
    """The number is reserved before anything is written and belongs to one try only, so a trainer that dies on the way leaves a
    gap, never half a version. Nobody hears of a version before its last byte is durable."""
    watch = walk.buffer.policy.WatchVersions(policy_pb2.WatchVersionsRequest(after=1))
    walk.learner.step((await up_to_batch(walk, 1)).groups, 1)
    number = await walk.buffer.reserve(1)
    version = await write(walk, number, 1)
    listed = await rpc.call(walk.buffer.policy.ListVersions, policy_pb2.ListVersionsRequest(), 5)
    assert number == 2 and [v.number for v in listed.versions] == [1]
    await walk.buffer.announce(version)
    assert (await watch.read()).version == version
    watch.cancel()
    listed = await rpc.call(walk.buffer.policy.ListVersions, policy_pb2.ListVersionsRequest(), 5)
    assert [(v.number, v.step) for v in listed.versions] == [(2, 1), (1, 0)]


async def test_a_version_is_exactly_the_trainers_weights(walk: Walk) -> None:
    """The manifest names every tensor's byte range in a plain safetensors file, with its checksum; what comes back is bit for
    bit what the trainer has."""
    walk.learner.step((await up_to_batch(walk, 1)).groups, 1)
    version = await publish(walk, 1)
    manifest = await read_manifest(walk.store, version, walk.run.run.name)
    assert (manifest.number, manifest.step, manifest.incarnation) == (2, 1, 1)
    assert {t.key for t in manifest.tensors} == {"versions/00000002-1/model.safetensors"}
    trained = walk.learner.model.state_dict()
    assert {t.name for t in manifest.tensors} == trained.keys()
    assert all(torch.equal(cooked(t), trained[t.name]) for t in await read_tensors(walk.store, manifest))


async def test_a_publication_makes_room_for_the_next_draws(walk: Walk) -> None:
    """Batch 1 no longer counts once its step is published: as many draws are made as it had groups, and whoever plays them must
    have weights that are new enough for the batch they will be in."""
    walk.learner.step((await up_to_batch(walk, 1)).groups, 1)
    assert not (await walk.buffer.lease(wait_s=0)).leases
    await publish(walk, 1)
    leases = await lease(walk)
    assert [s.lease.sample.draw.number for s in leases] == [8] * 4 + [9] * 4 + [10] * 4 + [11] * 4
    assert {s.min_step for s in leases} == {1}  # for batch 3, whose lag is at most 1: (3 - 1) - 1
