"""Where the ledger's logs go when Redis forgets them: `ledger/<epoch>-<sequence>-<crc32c>.jsonl`, an event or letter a line.

Not every line moves the ledger's sequence, and two commits may archive at once (a lost reply, then the same call again). So the
name has a checksum of the lines: other lines never overwrite what was trimmed on the strength of being there.
"""

from __future__ import annotations

import json

from services.buffer.ledger import Ledger
from slipstream.objects import ObjectStore
from slipstream.sample import crc32c


async def archive(ledger: Ledger, store: ObjectStore) -> int:
    """Write the live lines to the store, durably, and only then trim them; how many. After a crash they come once more."""
    lines = await ledger.archive()
    if lines:
        meta = (await ledger.balance()).meta
        text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines).encode()
        await store.put(f"ledger/{meta['epoch']:03d}-{meta['sequence']:012d}-{crc32c(text):08x}.jsonl", text)
        await ledger.trim(lines)
    return len(lines)
