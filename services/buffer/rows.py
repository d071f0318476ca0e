"""Lists between the ledger and its scripts, as packed rows: a quarter of what JSON costs on either side.

Each layout here has its twin in the script that reads or writes it (`struct` in Lua and in Python know the same forms).
Leases that only their sample tells apart travel as one run. Example: samples 3 to 7 of draw 401, second attempt, epoch 1 are
`<Q 401, I 3, I 5, I 2, I 1>`, 24 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from services.buffer.ledger import Lease, Partial, Scored, Submit

_LEASES = struct.Struct("<QIIII")
_SUBMIT = struct.Struct("<BdI")  # 1 = scored + 2 = bounded + 4 = the body is beside the script, reward, bytes of info
_INFO = struct.Struct("<IIIIII")  # crc32c, tokens, generated tokens, bytes of body, transcript, spilled body; the steps follow
_PARTIAL = struct.Struct("<?I")
_LENGTH = struct.Struct("<I")
_STEP = struct.Struct("<II")
_MEMBER = struct.Struct("<II")
_GRANTS = struct.Struct("<IIII")


def leases(items: Iterable[Lease]) -> bytes:
    """Leases, as runs."""
    runs: list[bytes] = []
    draw, first, attempt, epoch, after = -1, 0, 0, 0, 0
    for lease in items:
        if lease.sample == after and lease.draw == draw and lease.attempt == attempt and lease.epoch == epoch:
            after += 1
            continue
        if draw >= 0:
            runs.append(_LEASES.pack(draw, first, after - first, attempt, epoch))
        draw, first, attempt, epoch = lease
        after = first + 1
    if draw >= 0:
        runs.append(_LEASES.pack(draw, first, after - first, attempt, epoch))
    return b"".join(runs)


def submits(items: Iterable[Submit], beside: Collection[int] = ()) -> bytes:
    """What the ledger keeps of samples, beside their bodies; of those at the positions `beside`, the script gets no body."""
    parts: list[bytes] = []
    for n, s in enumerate(items):
        transcript = 0 if s.score else len(s.transcript)
        info = _INFO.pack(s.crc32c, s.tokens, s.generated_tokens, len(s.body), transcript, s.spilled) + _steps(s.steps)
        failure = s.failure.encode()
        kind = bool(s.score) + 2 * s.bounded + 4 * (n in beside)
        parts += _SUBMIT.pack(kind, s.reward + 0.0, len(info)), info, _LENGTH.pack(len(failure)), failure
    return b"".join(parts)


def rewards(items: Sequence[Scored]) -> bytes:
    """Rewards of scores. Equal ones have equal bytes: + 0.0 takes the sign from -0.0."""
    return struct.pack(f"<{len(items)}d", *[s.reward + 0.0 for s in items])


def partials(items: Iterable[Partial]) -> bytes:
    """What the ledger keeps of partials, beside their bodies."""
    parts: list[bytes] = []
    for p in items:
        steps = _steps(p.steps)
        parts += _PARTIAL.pack(p.release, len(steps)), steps
    return b"".join(parts)


def grants(rows: bytes) -> Iterator[tuple[int, int, int]]:
    """(place in the answer's groups, sample, attempt) of each grant."""
    for place, first, count, attempt in _GRANTS.iter_unpack(rows):
        for index in range(first, first + count):
            yield place - 1, index, attempt


class MemberRow(NamedTuple):
    """What the ledger keeps of a batch's member, beside its body and its score."""

    sample: int
    crc32c: int
    oldest_step: int
    newest_step: int
    tokens: int
    generated_tokens: int
    size: int  # bytes of the body
    spilled: int  # bytes of the body in the object store, whose key is then the body here


def members(rows: bytes) -> Iterator[MemberRow]:
    """The rows of a batch's members."""
    position = 0
    while position < len(rows):
        index, size = _MEMBER.unpack_from(rows, position)
        start = position + _MEMBER.size
        position = start + size
        crc, tokens, generated, body, _, spilled = _INFO.unpack_from(rows, start)
        steps = [step for step, _ in _STEP.iter_unpack(rows[start + _INFO.size:position])]
        yield MemberRow(index, crc, min(steps), max(steps), tokens, generated, body, spilled)


def _steps(steps: Sequence[tuple[int, int]]) -> bytes:
    return b"".join([_STEP.pack(*pair) for pair in steps])
