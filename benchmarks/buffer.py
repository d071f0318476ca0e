"""What the buffer costs over a bare Redis, what folding and the sample codec save, and what binds at scale.

    python -m benchmarks.buffer --json FILE [--rounds 5] [--seconds 60] [--samples 1000000] [--only put,fold,codec,scale,soak]

Ratios above 1 are faster than what they are compared with:
    put_ratio_*      bytes per second of StreamSamples over pipelined HSET + XADD of the same bodies into the same Redis
    fetch_ratio_*    bytes per second of ReadBatch over pipelined HMGET of the same bodies from the same Redis
    folded_over_single   time of one EVALSHA per put over that of one folded EVALSHA: 64 durable puts of 4 KB
    codec_ratio      time of packed protobuf over that of slipstream.sample, encode + decode of 32k tokens
    lease_p99_ms, cpu_s_per_mtok   see benchmarks/workers.py
    cost_1e6_over_1e3    see benchmarks/soak.py
Puts and fetches run in `memory` mode on the real service process; arms are interleaved, ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import redis
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from benchmarks import soak, workers
from benchmarks.record import publish
from benchmarks.served_buffer import ServedBuffer, body_of, handed, redis_server, run_of, served
from services.buffer.ledger import Lease, Rules, Submit, Version
from services.buffer.redis_ledger import RedisLedger, connect
from slipstream import rpc, sample, sample_stream
from slipstream.sample_stream import Handed

SIZES = {"4k": (512, 128, 8), "108k": (13_500, 32, 8), "428k": (53_500, 8, 8)}  # tokens, groups, samples in a group
FRAME_BYTES = 1 << 20
FOLD, FOLD_TOKENS = 64, 512
CODEC_TOKENS = 32_768
T = TypeVar("T")


def frames(items: Sequence[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """The items in order, in lists of about FRAME_BYTES."""
    frame, total = [], 0
    for item in items:
        frame.append(item)
        total += size(item)
        if total >= FRAME_BYTES:
            yield frame
            frame, total = [], 0
    if frame:
        yield frame


async def put(buffer: ServedBuffer, samples: Sequence[Handed]) -> float:
    """Seconds to hand in all over one stream."""
    started, count = time.perf_counter(), 0
    async for results in sample_stream.submit(buffer.stream, "rollout-0", samples, 60):
        assert not any(r.status.code for r in results), results[0]
        count += len(results)
    assert count == len(samples)
    return time.perf_counter() - started


def put_directly(client: redis.Redis, samples: Sequence[Any]) -> float:
    """Seconds to write the same bodies with pipelined HSET and XADD in pieces of about 1 MB."""
    started = time.perf_counter()
    for number, frame in enumerate(frames(samples, lambda s: len(s.body))):
        pipe = client.pipeline(transaction=False)
        for index, item in enumerate(frame):
            pipe.hset("direct", f"{number}:{index}", item.body)
            pipe.xadd("direct-log", {"m": f"{number}:{index}"})
        pipe.execute()
    return time.perf_counter() - started


def fetch_directly(client: redis.Redis, samples: Sequence[Any]) -> float:
    """Seconds to read them back with pipelined HMGET in pieces of about 1 MB."""
    started, total = time.perf_counter(), 0
    for number, frame in enumerate(frames(samples, lambda s: len(s.body))):
        pipe = client.pipeline(transaction=False)
        pipe.hmget("direct", [f"{number}:{index}" for index in range(len(frame))])
        total += sum(map(len, pipe.execute()[0]))
    assert total == sum(len(s.body) for s in samples)
    return time.perf_counter() - started


async def put_and_fetch(folder: Path, name: str, rounds: int) -> dict[str, float]:
    """Both ratios of one size."""
    tokens, groups, size = SIZES[name]
    puts, fetches, logging = [], [], []
    async with served(folder / name, run_of(groups, size, 1, tokens=tokens)) as buffer:
        direct = redis.Redis.from_url(buffer.redis_url)
        await buffer.client.begin()
        for batch in range(1, rounds + 2):
            body = body_of(tokens, batch - 1)
            leases = (await buffer.client.lease(groups * size)).leases
            samples = [handed(lease, body) for lease in leases[:groups * size]]
            served_s, direct_s = await put(buffer, samples), put_directly(direct, samples)
            started = time.perf_counter()
            assert (await buffer.client.batch(batch)).HasField("batch")
            numbered = time.perf_counter()
            count = sum([len(message.bodies) async for message in buffer.client.read_messages(batch)])
            fetch_s = time.perf_counter() - numbered
            assert count == len(samples)
            if batch > 1:  # the first one warms caches
                puts.append(direct_s / served_s)
                fetches.append(fetch_directly(direct, samples) / fetch_s)
                logging.append((numbered - started) * 1000)
            direct.delete("direct", "direct-log")
            await buffer.client.publish(batch)
            await buffer.client.commit(batch)
        direct.close()
    return {f"put_ratio_{name}": statistics.median(puts), f"fetch_ratio_{name}": statistics.median(fetches),
            f"number_ms_{name}": statistics.median(logging)}


async def folded(folder: Path, rounds: int) -> dict[str, float]:
    """One script for 64 durable puts against one script each, all 64 waiting at once."""
    body, ratios = body_of(FOLD_TOKENS), []
    async with redis_server(folder / "fold", "always") as (url, _):
        client = connect(url)
        ledger = RedisLedger(client, Rules.of(run_of(64, 8, 100)))
        await ledger.open({"sort": 1 << 40})
        taken = await ledger.take_incarnation(0, 0)
        number = await ledger.reserve_version(taken.incarnation, 0)
        await ledger.publish_version(Version(number, 0, taken.incarnation, "v", 0))

        async def submits() -> list[Submit]:
            granted = await ledger.grant_samples("w", FOLD, number)
            return [_submit(grant.lease, body) for grant in granted.grants]

        for turn in range(rounds + 1):
            many, one = await submits(), await submits()
            started = time.perf_counter()
            await ledger.submit_samples(many)
            between = time.perf_counter()
            await asyncio.gather(*(ledger.submit_samples([s]) for s in one))
            if turn:
                ratios.append((time.perf_counter() - between) / (between - started))
        await client.aclose()
    return {"folded_over_single": statistics.median(ratios)}


def _submit(lease: Lease, body: Any) -> Submit:
    return Submit(lease, body.data, body.crc32c, body.tokens, body.tokens - 1, [(0, 1)], score=b"\x09\0\0\0\0\0\0\0\0")


def packed_message() -> Any:
    """A message of the usual kind: repeated packed int32 tokens and mask, float log-probabilities, int32 versions."""
    file = descriptor_pb2.FileDescriptorProto(name="packed.proto", package="bench", syntax="proto3")
    message = file.message_type.add(name="Packed")
    field = descriptor_pb2.FieldDescriptorProto
    for number, (name, kind) in enumerate((("tokens", field.TYPE_INT32), ("mask", field.TYPE_INT32),
                                           ("logprobs", field.TYPE_FLOAT), ("versions", field.TYPE_INT32)), 1):
        message.field.add(name=name, number=number, type=kind, label=field.LABEL_REPEATED)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Packed"))


def codec(rounds: int) -> dict[str, float]:
    """Encode and decode 32k tokens, arrays in and arrays out, both ways."""
    rng, kind = np.random.default_rng(0), packed_message()
    tokens, mask = rng.integers(0, 150_000, CODEC_TOKENS).astype(np.int32), np.arange(CODEC_TOKENS) >= 100
    logprobs = -rng.exponential(0.5, int(mask.sum())).astype(np.float32)
    episode = sample.Sample([sample.Segment(tokens, mask, logprobs, (sample.Span(7, 6, 1, len(logprobs)),))])

    def ours() -> None:
        sample.decode(sample.encode(episode))

    def packed() -> None:
        data = kind(tokens=tokens.tolist(), mask=mask.astype(np.int32).tolist(), logprobs=logprobs.tolist(),
                    versions=[7] * len(logprobs)).SerializeToString()
        found = kind.FromString(data)
        for values, dtype in ((found.tokens, np.int32), (found.mask, np.bool_), (found.logprobs, np.float32),
                              (found.versions, np.int32)):
            np.fromiter(values, dtype, len(values))

    def seconds(function: Callable[[], None], times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            function()
        return (time.perf_counter() - started) / times

    return {"codec_ratio": statistics.median(seconds(packed, 5) / seconds(ours, 50) for _ in range(rounds))}


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All parts that were asked for, one after the other."""
    parts, figures = set(arguments.only.split(",")), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "put" in parts:
            for size in SIZES:
                figures |= await put_and_fetch(folder, size, arguments.rounds)
        if "fold" in parts:
            figures |= await folded(folder, arguments.rounds * 4)
        if "codec" in parts:
            figures |= codec(arguments.rounds)
        if "scale" in parts:
            figures |= await workers.measure(workers.Fleet(seconds=arguments.seconds))
        if "soak" in parts:
            figures |= await soak.measure(folder, arguments.samples)
    return figures


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--only", default="put,fold,codec,scale,soak")
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    figures = rpc.run(measure(arguments))
    rows = [[name, f"{value:.3f}" if isinstance(value, float) else str(value)] for name, value in figures.items()]
    publish("the buffer", ["figure", "value"], rows, figures, arguments.json)


if __name__ == "__main__":
    main()
