"""What a Redis ledger holds, in the shape of the in-memory model's `contents()`, and what is compared of both."""

from __future__ import annotations

import json
import struct
from typing import Any

from services.buffer.redis_ledger import RedisLedger
from services.buffer.scripts import NAMES


class Reader:
    """Reads what a script packed: the layouts GROUP and FORMS of ledger.lua."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.position = raw, 0

    def values(self, form: str) -> tuple[Any, ...]:
        self.position += struct.calcsize("<" + form)
        return struct.unpack_from("<" + form, self.raw, self.position - struct.calcsize("<" + form))

    def data(self, length: str = "I") -> bytes:
        """With a length in front."""
        size = self.values(length)[0]
        self.position += size
        return self.raw[self.position - size:self.position]

    def state(self) -> str:
        """Up to a zero byte."""
        start, self.position = self.position, self.raw.index(b"\0", self.position) + 1
        return self.raw[start:self.position - 1].decode()


def unpack_group(raw: bytes) -> dict[str, Any]:
    """A packed group in the model's shape; what is nothing is left out."""
    reader = Reader(raw)
    group: dict[str, Any] = {"e": reader.data().decode()}
    group.update(zip(("x", "n", "t", "m", "p", "q", "quiet"), reader.values("QHQQqBB"), strict=True), st=reader.state())
    group["k"], reserved, group["held"] = reader.values("QIQ")
    reader.data("H")  # its entry of `ready`
    group["s"] = [_unpack_sample(reader, reserved) for _ in range(group["n"])]
    return group


def _unpack_sample(reader: Reader, reserved: int) -> dict[str, Any]:
    sample: dict[str, Any] = {"st": reader.state()}
    sample["a"], sample["sa"] = reader.values("HH")
    holder, part, info, scorer, ended = (reader.data() for _ in range(5))
    sample.update(w=holder[16:].decode(), sw=scorer.decode())
    if holder:
        sample.update(g=_pairs(holder[:8])[0], t=struct.unpack("<Q", holder[8:16])[0])
    if sample["st"] == "scored":
        sample["rw"] = struct.unpack("<d", ended)[0]
    else:
        sample["why"] = ended.decode()
    if part:
        sample.update(lp=struct.unpack("<I", part[:4])[0], pp=_pairs(part[4:]))
    if info:
        names = ("c", "tok", "gen", "lb", "lt", "sb")
        sample.update(zip(names, struct.unpack("<6I", info[:24]), strict=True), sp=_pairs(info[24:]))
    if sample["st"] in ("open", "leased", "partial"):
        sample["r"] = reserved
    return sample


def _pairs(data: bytes) -> list[list[int]]:
    return [list(pair) for pair in struct.iter_unpack("<II", data)]


HOLDS = {
    "lb": ("unscored", "scoring", "scored"), "lt": ("unscored", "scoring"), "ls": ("scored",), "lp": ("leased", "partial")}


def same_form(groups: dict[int, dict[str, Any]], scores: dict[Any, bytes]) -> dict[int, dict[str, Any]]:
    """Groups as both ledgers can tell them: no fields that are nothing, sizes only of what a sample in its state can hold."""
    out = {}
    for draw, group in groups.items():
        samples = []
        for index, sample in enumerate(group["s"]):
            sample = {**sample, "ls": len(scores.get((draw, index), b""))}
            for part, states in HOLDS.items():
                if sample["st"] not in states:
                    sample.pop(part, None)
            samples.append({k: v for k, v in sample.items() if v})
        held = sum(s.get(part, 0) for s in samples for part in HOLDS)
        assert group.get("held", held) == held, f"{group}: holds {held} bytes"
        out[draw] = {**group, "s": samples, "held": held}
    return out


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """Contents in a common form. Entries of `unscored` name samples that may be gone or granted: only the others count."""
    groups = state["groups"] = same_form(state["groups"], state["scores"])
    state["unscored"] = [(d, i) for d, i in state["unscored"] if d in groups and groups[d]["s"][i]["st"] == "unscored"]
    return state


async def contents(client: Any, ledger: RedisLedger) -> dict[str, Any]:
    """What Redis holds, in the model's shape."""
    async with client.pipeline() as pipe:
        keys = ledger._scripts.keys
        for name in NAMES:
            if name in ("open", "leases", "scoring", "holds", "unfinished"):
                pipe.zrange(keys[name], 0, -1, withscores=True)
            elif name in ("unscored", "ready", "events", "dead"):
                pipe.xrange(keys[name])
            elif name == "drops":
                pipe.lrange(keys[name], 0, -1)
            else:
                pipe.hgetall(keys[name])
        raw = dict(zip(NAMES, await pipe.execute(), strict=True))
    meta = {k.decode(): v.decode() for k, v in raw["meta"].items()}
    lineage = json.loads(meta.pop("lineage", "[]"))
    groups = {int(d): unpack_group(g) for d, g in raw["groups"].items()}
    out: dict[str, Any] = {
        "meta": {k: int(v) for k, v in meta.items() if int(v)}, "lineage": lineage, "groups": groups,
        "open": sorted(_key(m) for m, _ in raw["open"]), "unfinished": [int(d) for d, _ in raw["unfinished"]],
        "unscored": [key for _, f in raw["unscored"] for key in struct.iter_unpack("<QI", f[b"s"])],
        "ready": [int(f[b"draw"]) for _, f in raw["ready"]],
        "drops": [json.loads(d) for d in raw["drops"]],
        "versions": {int(n): json.loads(v) for n, v in raw["versions"].items()},
        "batches": {int(n): json.loads(v) for n, v in raw["batches"].items()},
        "holds": {(int(m.split(b":")[0]), m.split(b":", 1)[1].decode()): int(t) for m, t in raw["holds"]},
        "cursor": {k.decode(): int(v) for k, v in raw["cursor"].items() if int(v)}}
    for name in ("leases", "scoring"):
        out[name] = {_key(m): int(t) for m, t in raw[name]}
    for name in ("bodies", "transcripts", "scores", "partials"):
        out[name] = {_key(m): v for m, v in raw[name].items()}
    for name in ("events", "dead"):
        out[name] = [json.loads(f[b"line"]) for _, f in raw[name]]
    return comparable(out)


def _key(member: bytes) -> tuple[int, int]:
    draw, index = member.split(b":")
    return int(draw), int(index)


def nonzero(counters: Any) -> dict[str, int]:
    return {k: v for k, v in counters.items() if v}


def plain(value: Any) -> Any:
    """Tuples as lists, Lua's empty table as an empty list."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in sorted(value.items())} or []
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value
