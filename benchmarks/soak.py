"""Whether the ledger stays flat: CPU per sample and memory after 10^3, 10^4, 10^5 and 10^6 samples of one run.

    python -m benchmarks.soak --json FILE [--samples 1000000] [--durability memory]

One process drives the real ledger on a real Redis through all hops (grant, submit, number, read, publish, commit, archive),
512 samples a batch, two batches in flight. CPU is that of this process (the ledger's Python) and of Redis, from /proc.
`cost_1e6_over_1e3` compares the last 10 % of the samples with those after the first thousand; so do the memory ratios.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from benchmarks.cost import process_cpu_s
from benchmarks.record import publish
from benchmarks.served_buffer import Body, body_of, redis_server, run_of
from services.buffer.ledger import Rules, Submit, Version
from services.buffer.redis_ledger import RedisLedger, connect
from slipstream import rpc

GROUPS, GROUP_SIZE, TOKENS = 64, 8, 64
BATCH = GROUPS * GROUP_SIZE
SCORE = b"\x09\0\0\0\0\0\0\xf0\x3f"  # a Score of 1.0
EARLY = 32  # batches whose cost is the yardstick, after two that warm up


@dataclass
class Point:
    """Totals after some number of samples."""

    samples: int
    cpu_s: float
    redis_bytes: int
    rss_bytes: int


class Soak:
    """One run of the ledger; `point()` after any number of batches."""

    def __init__(self, ledger: RedisLedger, server: redis.Redis, redis_pid: int) -> None:
        self.ledger, self.server, self.redis_pid = ledger, server, redis_pid
        self.batch = self.incarnation = self.version = 0

    async def begin(self) -> None:
        await self.ledger.open({"sort": 1 << 40})
        self.incarnation = (await self.ledger.take_incarnation(0, 0)).incarnation
        await self._publish(0)

    async def _publish(self, step: int) -> None:
        self.version = await self.ledger.reserve_version(self.incarnation, step)
        await self.ledger.publish_version(Version(self.version, step, self.incarnation, f"versions/{self.version}", 0))

    async def step(self) -> None:
        """One batch through all hops."""
        granted = await self.ledger.grant_samples("rollout-0", BATCH, self.version)
        body: Body = body_of(TOKENS, self.batch)
        await self.ledger.submit_samples([
            Submit(g.lease, body.data, body.crc32c, TOKENS, TOKENS - 1, [(self.batch, self.incarnation)], score=SCORE)
            for g in granted.grants])
        self.batch += 1
        assert (await self.ledger.number_batch(self.incarnation, self.batch)).numbered
        await self.ledger.read_batch(self.batch)
        await self._publish(self.batch)
        await self.ledger.commit(self.incarnation, self.batch)
        await self.ledger.trim(await self.ledger.archive())

    def point(self) -> Point:
        status = Path("/proc/self/status").read_text()
        rss = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
        memory: Any = self.server.info("memory")
        return Point(self.batch * BATCH, process_cpu_s(os.getpid()) + process_cpu_s(self.redis_pid), memory["used_memory"], rss)


async def measure(folder: Path, samples: int, durability: str = "memory") -> dict[str, Any]:
    """The figures, and a line per decade on the way."""
    batches = max(samples // BATCH, 4 * EARLY)
    late = batches - max(batches // 10, EARLY)
    marks: dict[int, Point] = {}
    wanted = {2, 2 + EARLY, late, batches, *(10**e // BATCH for e in range(3, 9))}
    async with redis_server(folder / "soak", durability) as (url, pid):
        client, server = connect(url), redis.Redis.from_url(url)
        soak = Soak(RedisLedger(client, Rules.of(run_of(GROUPS, GROUP_SIZE, 1))), server, pid)
        await soak.begin()
        while soak.batch < batches:
            await soak.step()
            if soak.batch in wanted:
                point = marks[soak.batch] = soak.point()
                print(f"{point.samples:>9} samples: {point.cpu_s / point.samples * 1e6:6.1f} us CPU each so far, "
                      f"Redis {point.redis_bytes / 1e6:.1f} MB, this process {point.rss_bytes / 1e6:.0f} MB", flush=True)
        await client.aclose()
        server.close()

    def cost_us(first: int, last: int) -> float:
        return (marks[last].cpu_s - marks[first].cpu_s) / (marks[last].samples - marks[first].samples) * 1e6

    early, final = cost_us(2, 2 + EARLY), cost_us(late, batches)
    return {
        "cost_1e6_over_1e3": final / early, "sample_cpu_us_early": early, "sample_cpu_us_late": final,
        "redis_memory_late_over_early": marks[batches].redis_bytes / marks[2 + EARLY].redis_bytes,
        "process_memory_late_over_early": marks[batches].rss_bytes / marks[2 + EARLY].rss_bytes,
        "soak_samples": marks[batches].samples}


async def _main(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return await measure(Path(folder), arguments.samples, arguments.durability)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--durability", default="memory", choices=("always", "everysec", "memory"))
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    figures = rpc.run(_main(arguments))
    rows = [[name, f"{value:.3f}" if isinstance(value, float) else str(value)] for name, value in figures.items()]
    publish("the ledger over a long run", ["figure", "value"], rows, figures, arguments.json)


if __name__ == "__main__":
    main()
