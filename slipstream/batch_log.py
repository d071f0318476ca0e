"""The batch log as its readers see it: one object per numbered batch, with its composition and all bodies.

`batches/<k:08d>.bin`, written once, by the buffer:

    offset 0   8 bytes  magic "SLIPBAT1"
           8   u64 LE   size of the serialized `Batch`
          16   u32 LE   CRC-32C of it
          20   u32 LE   0
          24            `Batch` (references in it are absolute offsets into this object), then zeros
     bodies             one SampleBody after the other, in the order of the members

It is the truth for replay, fork and rescoring: weights are a function of a checkpoint and of these objects alone.

Example:
    batch = await read_header(store, 7)
    bodies = await read_bodies(store, batch)    # {(ledger epoch, draw, index): bytes}
"""

from __future__ import annotations

import struct

from slipstream.errors import SlipstreamError
from slipstream.objects import ObjectStore
from slipstream.protos.buffer.v1 import batches_pb2
from slipstream.sample import crc32c

FOLDER = "batches/"
MAGIC = b"SLIPBAT1"
HEAD = struct.Struct("<8sQII")

SampleKey = tuple[int, int, int]  # (ledger epoch, draw, index)


def log_key(batch: int) -> str:
    """Object key of batch k."""
    return f"{FOLDER}{batch:08d}.bin"


async def numbers(store: ObjectStore) -> list[int]:
    """Numbers of the logged batches, ascending."""
    return sorted(int(key.removeprefix(FOLDER).removesuffix(".bin")) for key in await store.list(FOLDER))


async def read_header(store: ObjectStore, batch: int) -> batches_pb2.Batch:
    """The composition of a logged batch. Raises NotFound; SlipstreamError (BATCH_LOG) when it is damaged."""
    key = log_key(batch)
    magic, size, checksum, _ = HEAD.unpack(await store.get(key, 0, HEAD.size))
    data = await store.get(key, HEAD.size, size) if magic == MAGIC else b""
    if magic != MAGIC or crc32c(data) != checksum:
        raise SlipstreamError(f"batch log {key} is damaged: its header does not match its checksum", "BATCH_LOG", key=key)
    return batches_pb2.Batch.FromString(data)


async def read_bodies(store: ObjectStore, batch: batches_pb2.Batch) -> dict[SampleKey, bytes]:
    """All bodies of a batch, each checked. Raises NotFound; SlipstreamError (BATCH_LOG) when one is damaged."""
    members = [member for group in batch.groups for member in group.members]
    if not members:
        return {}
    key, first = log_key(batch.batch), members[0].body.offset
    end = max(m.body.offset + m.body.size for m in members)
    data = memoryview(await store.get(key, first, end - first))
    bodies: dict[SampleKey, bytes] = {}
    for member in members:
        ref, sample = member.body, member.sample
        body = bytes(data[ref.offset - first : ref.offset - first + ref.size])
        if crc32c(body) != ref.crc32c:
            raise SlipstreamError(
                f"batch log {key} is damaged at byte {ref.offset}: the body does not match its checksum", "BATCH_LOG", key=key)
        bodies[sample.draw.ledger_epoch, sample.draw.number, sample.index] = body
    return bodies
