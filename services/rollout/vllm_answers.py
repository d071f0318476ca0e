"""From vLLM's outputs to ours: a request in flight, its pieces, the policy versions that sampled them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.rollout.engine import Ended, Generation, Request
from slipstream.errors import SlipstreamError
from slipstream.protos.types.v1 import policy_pb2
from slipstream.sample import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, Span

FINISH = {"stop": FINISH_STOP, "length": FINISH_LENGTH, "abort": FINISH_ABORT}
NOTHING = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), (), FINISH_ABORT)
Starts = Sequence[tuple[str, int]]  # (what vLLM stamps on tokens: the number of the exchange; the first such token)


@dataclass(slots=True, eq=False)
class Asked:
    """A request in flight."""

    request: Request
    ended: Ended | None  # None: a stream
    since: int  # the exchange that was the last when it came
    pieces: asyncio.Queue[Generation | SlipstreamError] = field(default_factory=asyncio.Queue)  # bounded by its tokens
    sent: list[Generation] = field(default_factory=list)
    collector: Any = None  # vLLM's, while vLLM has it
    aborted: bool = False


def rest(request: Request, sent: Sequence[Generation]) -> Request:
    """The rest of a request whose stream has sent something already."""
    if not sent:
        return request
    tokens = np.concatenate([piece.tokens for piece in sent])
    return dataclasses.replace(
        request, prompt=np.concatenate([request.prompt, tokens]), max_new_tokens=request.max_new_tokens - len(tokens),
        position=request.position + len(tokens))


def spans_of(completion: Any) -> Starts:
    """Starts of the versions of a finished answer."""
    return [(span.version, span.start) for span in completion.weight_versions or ()]


def generation(
    completion: Any, told: int, starts: Starts, versions: Mapping[int, policy_pb2.PolicyVersion]
) -> Generation:
    """vLLM's completion, whose first token is the `told`-th of its answer. `starts` count from the answer's first token."""
    tokens = np.asarray(completion.token_ids, np.int32)
    found = completion.logprobs
    logprobs = np.asarray([found.logprobs[i] for i in found.start_indices] if found else [], np.float32)
    spans: list[Span] = []
    end = told + len(tokens)
    for label, start in reversed(starts):
        if (start := max(start, told)) < end:
            version, length = versions[int(label)], end - start
            if spans and (spans[0].version, spans[0].incarnation) == (version.number, version.incarnation):
                length += spans.pop(0).length  # the same version loaded again
            spans.insert(0, Span(version.number, version.step, version.incarnation, length))
            end = start
    finish = FINISH.get(completion.finish_reason, FINISH_ABORT) if completion.finish_reason else 0
    return Generation(tokens, logprobs, tuple(spans), finish)


def add_routes(asked: Asked, answer: Generation, rows: tuple[bytes, Sequence[int], str] | None) -> bool:
    """Give a finished answer the rows that its worker recorded: [P + n - 1, L, K]. False when it has none and needs them."""
    if not asked.request.routes or not len(answer.tokens):
        return True
    if rows is None:
        return False
    data, shape, dtype = rows
    size = len(asked.request.prompt) + sum(len(piece.tokens) for piece in asked.sent) + len(answer.tokens) - 1
    answer.routes = np.frombuffer(data, np.dtype(dtype)).reshape(tuple(shape))[:size]
    return True
