"""What a worker hands in is checked here, before the ledger sees it.

The checks are those of slipstream.sample; a body that plainly passes them is recognised by its layout, without
making arrays (4 µs instead of 30). Whatever is not plain goes the long way, which also finds the words for what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from services.buffer.front import to_lease
from services.buffer.ledger import Partial, Submit
from slipstream import plain_body, sample
from slipstream.errors import InvalidInput
from slipstream.protos.buffer.v1 import samples_pb2
from slipstream.protos.types.v1 import sample_pb2

_EMPTY_SCORE = b"\x2a\x00"  # a Score with its empty `failure` written out
Found = tuple[int, int, Sequence[tuple[int, int]]]  # tokens, generated tokens, distinct (step, incarnation)


def checked_sample(wire: samples_pb2.SubmittedSample, body: bytes | memoryview) -> Submit:
    """A submitted sample: checksum, contents, header against body, score. Raises InvalidInput with the reason to count."""
    lease = to_lease(wire.lease)
    if wire.failure:
        return Submit(lease, b"", 0, 0, 0, (), failure=wire.failure[:200])
    checksum = wire.crc32c
    if sample.crc32c(body) != checksum:
        raise InvalidInput(f"the body of draw {lease.draw} sample {lease.sample} has another crc32c; send it again", "CRC")
    tokens, generated, steps = _plain(body) or _thorough(body)
    told = (wire.tokens, wire.generated_tokens, wire.oldest_step, wire.newest_step)
    if (found := (tokens, generated, steps[0][0], steps[-1][0])) != told:
        raise InvalidInput(
            f"tokens, generated_tokens, oldest_step, newest_step = {told}, but the body has {found}", "HEADER_MISMATCH")
    if wire.HasField("score"):
        return Submit(lease, body, checksum, tokens, generated, steps, score=checked_score(wire.score),
                      reward=sample.reward_of(wire.score), bounded=True)
    return Submit(lease, body, checksum, tokens, generated, steps, wire.transcript, bounded=True)


def checked_partial(wire: samples_pb2.PartialSample) -> Partial:
    """A partial: checksum and form. It may have no generated token yet."""
    if sample.crc32c(wire.body) != wire.crc32c:
        raise InvalidInput("the body of a partial has another crc32c; send it again", "CRC")
    return Partial(to_lease(wire.lease), wire.body, _steps(sample.decode(wire.body)), wire.release)


def checked_score(score: sample_pb2.Score) -> bytes:
    """A score as stored. Never empty, since no bytes mean "no score" (a scalar of 0 serializes to nothing)."""
    if score.per_turn or score.components or score.HasField("per_token") or not math.isfinite(score.scalar):
        sample.validate_score(score)
    return score.SerializeToString() or _EMPTY_SCORE


def _plain(body: bytes | memoryview) -> Found | None:
    """What the ledger needs of a body, if all is well with it and it has one segment without routes."""
    if (plain := plain_body.read(body)) is None or not (generated := plain.generated):
        return None
    if plain.turns and sum(length for _, length in plain.turns) != generated:
        return None
    end = plain.logprobs_at + plain_body.ITEM_BYTES * generated
    if sum(plain.runs) != plain.size or sum(plain.runs[1::2]) != generated or not _are_logprobs(body[plain.logprobs_at:end]):
        return None
    if sum(length for *_, length in plain.spans) != generated:
        return None
    return plain.size, generated, sorted({(step, incarnation) for _, step, incarnation, _ in plain.spans})


def _are_logprobs(data: bytes | memoryview) -> bool:
    """Whether all are finite and none is above 0. numpy takes 5 µs for a look at however few."""
    if len(data) < 512:
        few = memoryview(data).cast("f")
        return max(few) <= 0 and sum(few) > -math.inf  # a NaN makes the sum one, and fails
    values = np.frombuffer(data, np.float32)
    return bool(values.max() <= 0 and values.min() > -math.inf)  # a NaN fails both


def _thorough(body: bytes | memoryview) -> Found:
    decoded = sample.decode(body)
    sample.validate(decoded)
    return decoded.tokens, decoded.generated_tokens, _steps(decoded)


def _steps(decoded: sample.Sample) -> list[tuple[int, int]]:
    return sorted({(span.step, span.incarnation) for segment in decoded.segments for span in segment.spans})
