"""The trainer's side of the canary: sequences that together visit every expert, scored at each publication.

A probe costs a publication one small forward pass. Its tokens are drawn from the run's seed once, at the trainer's start; then
their number is doubled as long as that visits more experts. Routers move while training, so what is visited is counted
again at each publication and travels with the figures.

Axes: N sequences, T tokens each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from slipstream import logs
from slipstream.model import experts_of
from slipstream.probes import Probes
from slipstream.seeds import stream

LENGTH, FIRST, MOST = 16, 4, 64  # tokens of a sequence; sequences at least and at most

log = logs.get("trainer.probes")


class Prober:
    """Scores the probes of one model. Takes a few small forward passes when made; `run_seed` names the sequences.

    On many ranks it is made, and asked, on all of them: `experts` is then the number on all of them together, and `agreed`
    turns what each rank has counted into one number, for two ranks may break a router's tie in two ways.
    """

    def __init__(
        self, model: Any, vocabulary: int, run_seed: int, experts: int | None = None,
        agreed: Callable[[int], int] = lambda visited: visited,
    ) -> None:
        self._model, self._agreed = model, agreed
        self._experts = experts_of(model)
        self.experts = sum(int(m.num_experts) for m in self._experts) if experts is None else experts
        random = np.random.default_rng(stream(run_seed, "probes"))
        drawn = random.integers(0, vocabulary, (MOST, LENGTH)).astype(np.int32)
        self.tokens = drawn[:FIRST]
        visited = self.score().experts_visited
        while visited < self.experts and len(self.tokens) < MOST:
            fewer, self.tokens = self.tokens, drawn[:2 * len(self.tokens)]
            visited, before = self.score().experts_visited, visited
            if visited == before:
                self.tokens = fewer
                break
        log.info(
            f"probes: {len(self.tokens)} sequences of {LENGTH} tokens visit {visited} of {self.experts} experts in "
            f"{len(self._experts)} layers")

    @torch.no_grad()
    def score(self) -> Probes:
        """The probes under the weights of now."""
        visited: list[int] = []

        def count(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            visited.append(int(torch.unique(args[1] if len(args) > 1 else kwargs["top_k_index"]).numel()))

        hooks = [m.register_forward_pre_hook(count, with_kwargs=True) for m in self._experts]
        try:
            ids = torch.from_numpy(self.tokens).long().to(self._model.device)
            logits = self._model(input_ids=ids[:, :-1], use_cache=False).logits.float()
        finally:
            for hook in hooks:
                hook.remove()
        logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
        return Probes(self.tokens, logprobs.cpu().numpy(), self._agreed(sum(visited)), self.experts)

