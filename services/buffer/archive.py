"""Where the ledger's logs go when Redis forgets them: `ledger/<epoch>-<sequence>.jsonl`, one line an event or a dead letter."""

from __future__ import annotations

import json

from services.buffer.ledger import Ledger
from slipstream.objects import ObjectStore


async def archive(ledger: Ledger, store: ObjectStore) -> int:
    """Write the live lines to the store, durably, and only then trim them; how many. After a crash they come once more."""
    lines = await ledger.archive()
    if lines:
        meta = (await ledger.balance()).meta
        text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
        await store.put(f"ledger/{meta['epoch']:03d}-{meta['sequence']:012d}.jsonl", text.encode())
        await ledger.trim(lines)
    return len(lines)
