"""The sequences in flight, as arrays with one row per slot, so that a decode step touches them without a loop over rows.

Rows 0..active-1 are in use; a row that leaves is filled by the last one, so the cache of the active rows stays one block.

Axes: S slots, C context.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from services.rollout.engine import Generation, Request
from slipstream.protos.types.v1 import policy_pb2
from slipstream.sample import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, Span


class Rows:
    """Bookkeeping of the decoder; knows nothing of models."""

    def __init__(self, slots: int, context: int) -> None:
        self.slots, self.context, self.active = slots, context, 0
        self.tokens = np.zeros((slots, context), np.int32)
        self.logprobs = np.zeros((slots, context), np.float32)
        self.length = np.zeros(slots, np.int64)  # tokens so far, prompt included
        self.prompt = np.zeros(slots, np.int64)
        self.limit = np.zeros(slots, np.int64)  # the row ends when `length` reaches it
        self.seed = np.zeros(slots, np.uint64)
        self.offset = np.zeros(slots, np.int64)  # sampling position = offset + length
        self.temperature = np.ones(slots, np.float32)
        self.greedy = np.zeros(slots, bool)
        self.stop = np.full((slots, 1), -1, np.int32)  # stop token ids, padded with -1
        self.routes: np.ndarray | None = None  # [S, C, L, K], allocated at the first capture
        self.requests: list[Request] = []
        self.versions: list[list[tuple[int, policy_pb2.PolicyVersion]]] = []  # per row: (first length it sampled, version)

    def _arrays(self) -> list[np.ndarray]:
        arrays = [self.tokens, self.logprobs, self.length, self.prompt, self.limit, self.seed, self.offset, self.temperature,
                  self.greedy, self.stop]
        return arrays if self.routes is None else [*arrays, self.routes]

    def add(self, requests: Sequence[Request], version: policy_pb2.PolicyVersion) -> np.ndarray:
        """Take the next rows for requests; their numbers."""
        first, last = self.active, self.active + len(requests)
        sizes = [len(request.prompt) for request in requests]
        new = slice(first, last)
        self.length[new] = self.prompt[new] = sizes
        self.limit[new] = [min(n + r.max_new_tokens, self.context) for n, r in zip(sizes, requests, strict=True)]
        self.seed[new] = np.array([request.seed for request in requests], np.uint64)
        self.offset[new] = [request.position - n for n, request in zip(sizes, requests, strict=True)]
        self.temperature[new] = [request.temperature for request in requests]
        self.greedy[new] = [request.greedy for request in requests]
        self.stop[new] = -1
        for stops in {request.stop_token_ids for request in requests}:
            self._stop_at(stops, [first + i for i, request in enumerate(requests) if request.stop_token_ids == stops])
        for row, (size, request) in enumerate(zip(sizes, requests, strict=True), first):
            self.tokens[row, :size] = request.prompt
            self.versions.append([(size, version)])
        self.requests += requests
        self.active = last
        return np.arange(first, last)

    def _stop_at(self, stops: tuple[int, ...], rows: Sequence[int]) -> None:
        if len(stops) > self.stop.shape[1]:
            more = np.full((self.slots, len(stops) - self.stop.shape[1]), -1, np.int32)
            self.stop = np.concatenate([self.stop, more], axis=1)
        self.stop[rows, : len(stops)] = stops

    def note_version(self, version: policy_pb2.PolicyVersion) -> None:
        """From here on `version` samples the tokens of all active rows."""
        for row, versions in enumerate(self.versions):
            length = int(self.length[row])
            if versions[-1][0] == length:
                versions.pop()
            versions.append((length, version))

    def append(self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """One sampled token for each of `rows`."""
        length = self.length[rows]
        self.tokens[rows, length] = tokens
        self.logprobs[rows, length] = logprobs
        self.length[rows] = length + 1

    def finished(self) -> tuple[np.ndarray, np.ndarray]:
        """(row numbers, whether a stop token ended them) of the rows that have ended, ascending."""
        active = self.active
        length = self.length[:active]
        last = self.tokens[np.arange(active), length - 1]
        stopped = (self.stop[:active] == last[:, None]).any(axis=1) & (length > self.prompt[:active])
        rows = np.flatnonzero(stopped | (length >= self.limit[:active]))
        return rows, stopped[rows]

    def generation(self, row: int, finish_reason: int, start: int = 0) -> Generation:
        """The row as a Generation, from its `start`-th new token on."""
        size, length = int(self.prompt[row]), int(self.length[row])
        first = size + start
        end, spans = length, []
        for at, version in reversed(self.versions[row]):
            if (at := max(at, first)) < end:
                spans.append(_span(version.number, version.step, version.incarnation, end - at))
                end = at
        routes = None
        if self.requests[row].routes and self.routes is not None and finish_reason:
            routes = self.routes[row, : length - 1].copy()
        return Generation(
            self.tokens[row, first:length].copy(), self.logprobs[row, first:length].copy(), tuple(reversed(spans)),
            finish_reason, routes)

    def remove(self, gone: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drop rows (ascending numbers) and close the gaps: (source, target) row numbers of the moves."""
        left = self.active - len(gone)
        alive = np.ones(self.active, bool)
        alive[gone] = False
        target, source = gone[gone < left], left + np.flatnonzero(alive[left:])
        for array in self._arrays():
            array[target] = array[source]
        for to, origin in zip(target.tolist(), source.tolist(), strict=True):
            self.requests[to], self.versions[to] = self.requests[origin], self.versions[origin]
        del self.requests[left:], self.versions[left:]
        self.active = left
        return source, target


@functools.lru_cache(1024)
def _span(version: int, step: int, incarnation: int, length: int) -> Span:
    """A span; the answers of one version have few lengths, so most are shared."""
    return Span(version, step, incarnation, length)


def finish_reason(stopped: bool, aborted: bool = False) -> int:
    """The wire's name for why a row ended."""
    return FINISH_ABORT if aborted else FINISH_STOP if stopped else FINISH_LENGTH
