"""Bodies for which the quota has no room go to the object store, and the ledger keeps their keys: a member of an open group is
never refused.

`spill/<epoch>-<draw>-<sample>-<attempt>-<crc32c>` is written before the ledger knows of it, read when its batch is logged, and
deleted after a commit, once every draw up to its own is committed or dropped. What nobody came to know of goes the same way.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from prometheus_client import Counter

from services.buffer.ledger import BatchedGroup, Composition, Ledger, Member, Outcome, Submit
from slipstream.errors import SlipstreamError
from slipstream.objects import ObjectStore
from slipstream.sample import crc32c

_PREFIX = "spill/"


class Spill:
    def __init__(self, ledger: Ledger, store: ObjectStore, spilled: Counter) -> None:
        self._ledger, self._store, self._spilled = ledger, store, spilled

    async def submit(self, submits: Sequence[Submit]) -> list[Outcome]:
        """As the ledger's `submit_samples` of bounded ones; the outcome is never SPILL."""
        outcomes = await self._ledger.submit_samples(submits)
        if over := [n for n, outcome in enumerate(outcomes) if outcome is Outcome.SPILL]:
            spilled = await asyncio.gather(*(self._put(submits[n]) for n in over))
            for n, outcome in zip(over, await self._ledger.submit_samples(spilled), strict=True):
                outcomes[n] = outcome
        return outcomes

    async def _put(self, submit: Submit) -> Submit:
        lease = submit.lease
        key = f"{_PREFIX}{lease.epoch}-{lease.draw}-{lease.sample}-{lease.attempt}-{submit.crc32c:08x}"
        await self._store.put(key, submit.body)
        self._spilled.inc()
        return dataclasses.replace(submit, body=key.encode(), bounded=False, spilled=len(submit.body))

    async def whole(self, composition: Composition) -> Composition:
        """The composition with all bodies, those of the object store too. Raises SlipstreamError for a damaged one."""
        if not any(m.spilled for g in composition.groups for m in g.members):
            return composition
        return dataclasses.replace(composition, groups=[await self._whole(group) for group in composition.groups])

    async def _whole(self, group: BatchedGroup) -> BatchedGroup:
        return dataclasses.replace(group, members=await asyncio.gather(*map(self._read, group.members)))

    async def _read(self, member: Member) -> Member:
        if not member.spilled:
            return member
        key = member.body.decode()
        body = await self._store.get(key)
        if len(body) != member.spilled or crc32c(body) != member.crc32c:
            raise SlipstreamError(f"spilled body {key} is damaged: it does not match its checksum", "SPILL", key=key)
        return dataclasses.replace(member, body=body, spilled=0)

    async def collect(self) -> None:
        """Delete what no draw needs any more."""
        if keys := await self._store.list(_PREFIX):
            holders = await self._ledger.holders(leases=False)
            epoch = int(holders.balance.meta["epoch"])
            for key in keys:
                of_epoch, draw = map(int, key.removeprefix(_PREFIX).split("-")[:2])
                if of_epoch < epoch or draw < holders.low_water_mark:
                    await self._store.delete(key)
