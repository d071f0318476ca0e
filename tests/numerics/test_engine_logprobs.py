"""A sampled token's log-probability is that of the version stamped on it, freely routed and with the recorded routes replayed.

The oracle is transformers: one full forward, no cache, with the weights of the version. Replaying goes through the router's own
code: its last `torch.topk` is answered with the recorded indices and the values that stand there.

Axes: T tokens of a sequence, n of them generated, N rows of a router, E experts, L MoE layers, K experts per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from services.rollout.decoder import Decoder
from services.rollout.engine import Generation, Request
from slipstream.model import state
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.sample import Span
from tests.engine_models import MOE, prompts, tiny

TOLERANCE = 1e-5
NEW_TOKENS, BEFORE_SWAP = 24, 9
EXPERTS = 8
Answers = list[tuple[np.ndarray, Generation]]


class Replay(TorchFunctionMode):
    """Routers choose what `routes` [T-1, L, K] says, layer after layer, at every position that `where` [T-1] marks."""

    def __init__(self, routes: np.ndarray, where: np.ndarray) -> None:
        super().__init__()
        self.routes, self.where, self.layer = torch.from_numpy(routes.astype(np.int64)), torch.from_numpy(where), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].shape[-1] != EXPERTS or args[0].ndim != 2:
            return result  # choices among groups of experts come before the choice of experts
        index_N_K = torch.where(self.where[:, None], self.routes[:, self.layer], result.indices)
        self.layer += 1
        return torch.return_types.topk((args[0].gather(-1, index_N_K), index_N_K))  # pyright: ignore


def generate(family: str) -> tuple[dict[int, Any], Answers]:
    """Models by version, and twelve answers that began under version 1 and were finished by a quite different version 2."""
    versions = {number: tiny(family, seed=number) for number in (1, 2)}
    first = PolicyVersion(number=1)
    decoder = Decoder(tiny(family, seed=1), 16, 48, capture_routes=True, recompute_on_swap=True, version=first)
    requests = [Request(p, NEW_TOKENS, seed=i, routes=True) for i, p in enumerate(p for p in prompts(4) for _ in range(3))]
    for request in requests:
        decoder.submit(request)
    for _ in range(BEFORE_SWAP - 1):  # the first step also samples the token that follows the prompt
        assert not decoder.step()
    decoder.load(state(versions[2]), PolicyVersion(number=2, step=1))
    done: dict[int, Generation] = {}
    while decoder.active:
        done.update((request.id, generation) for request, generation in decoder.step())
    return versions, [(r.prompt, done[r.id]) for r in requests]


@pytest.fixture(scope="module", params=MOE)
def played(request: pytest.FixtureRequest) -> tuple[dict[int, Any], Answers]:
    return generate(request.param)


@torch.inference_mode()
def gaps(played: tuple[dict[int, Any], Answers], shift: int | None = None) -> np.ndarray:
    """|engine - transformers| of every generated token, each under its own version's weights.

    With `shift`, the recorded routes are replayed, moved by that many tokens. One row is recorded per position, by the version
    that sampled the next token, and it is replayed to that version only: after a swap the cache of earlier positions was
    computed again, with routes of the new version that nobody recorded.
    """
    models, answers = played
    found = []
    for prompt, generation in answers:
        assert generation.routes is not None
        tokens = torch.from_numpy(np.concatenate([prompt, generation.tokens])).long()
        stamped = np.repeat([s.version for s in generation.spans], [s.length for s in generation.spans])  # [n]
        recorded_by = np.concatenate([np.full(len(prompt) - 1, stamped[0]), stamped])  # [T-1]
        for number in np.unique(stamped).tolist():
            replay = Replay(np.roll(generation.routes, shift or 0, axis=0), (recorded_by == number) & (shift is not None))
            with replay:
                logits = models[number](input_ids=tokens[None, :-1], use_cache=False).logits[0, len(prompt) - 1 :].float()
            assert replay.layer == generation.routes.shape[1]
            expected = torch.log_softmax(logits, -1).gather(1, tokens[len(prompt) :, None])[:, 0].numpy()
            found.append(np.abs(expected - generation.logprobs)[stamped == number])
    return np.concatenate(found)


def test_log_probabilities_are_those_of_the_stamped_version(played: tuple[dict[int, Any], Answers]) -> None:
    """Across a swap in the middle (on_swap = "recompute") every token agrees with a full forward of the weights that its span
    names, to 1e-5 in fp32. Under the other version's weights it does not."""
    models, answers = played
    assert {g.spans for _, g in answers} == {(Span(1, 0, 0, BEFORE_SWAP), Span(2, 1, 0, NEW_TOKENS - BEFORE_SWAP))}
    assert gaps(played).shape == (12 * NEW_TOKENS,)
    assert gaps(played).max() <= TOLERANCE
    assert gaps(({1: models[2], 2: models[1]}, answers)).mean() > 0.1


def test_recorded_routes_replayed_give_the_same_log_probabilities(played: tuple[dict[int, Any], Answers]) -> None:
    """A trainer that replays the routes sees what the sampler computed, to 1e-5; moved by one token they are far off."""
    assert gaps(played, shift=0).max() <= TOLERANCE
    assert gaps(played, shift=1).max() > 1000 * TOLERANCE
