"""On-policy distillation: a teacher says of every token that the student sampled how likely it would have been for it.

    A_t += teacher_coefficient (log pi_T(token t) - log mu(token t))

Its mean over tokens that mu samples is -KL(mu || pi_T) at that place, so the policy gradient of this advantage descends the
reverse KL of student and teacher in the states that the student comes to. GKD (arXiv 2306.13649, section 3.2) with the sampled
token in place of the sum over the vocabulary; no discount: a token answers for itself alone ("On-Policy Distillation", Thinking
Machines Lab 2025). log mu is the sampler's record, so no other forward pass than the teacher's is needed.

With `advantage = "none"` this is all; else it is added to the advantages of the reward, after whitening.

Axes: M trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from services.trainer.packing import Row, in_order_of
from services.trainer.ranks import Alone
from slipstream import config
from slipstream.errors import ConfigError


class Teacher:
    """A model of the run's vocabulary that does not change. Raises ConfigError when it cannot be built or has other tokens."""

    def __init__(self, run: config.RunFile, tokenizer: Any, ranks: Alone) -> None:
        path = run.algorithm.teacher
        settings = config.Model(path=path).model_copy(update={"dtype": run.model.dtype, "experts": run.model.experts})
        try:
            model, own = ranks.built(settings)
        except ConfigError as error:
            raise ConfigError(error.message.replace("model.path", "algorithm.teacher")) from error
        if own.get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                f"algorithm.teacher = {path!r}: its tokenizer has {len(own.get_vocab())} tokens that are not all the model's "
                f"{len(tokenizer.get_vocab())}: it cannot judge them; take a teacher of the same vocabulary")
        self._ranks, self._scorer = ranks, ranks.scorer(model.requires_grad_(False))
        self._coefficient, self._budget = run.algorithm.teacher_coefficient, run.trainer.tokens_per_microbatch
        self._sums = 0.0, 0  # of log mu - log pi_T, and tokens, of this rank's rows

    @torch.no_grad()
    def taught(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with the teacher's part added to their advantages."""
        batches = self._ranks.microbatches(rows, self._budget)
        parts = [self._scorer(batch)[0].double().cpu().numpy() for batch in batches]
        gaps = [found - row.behaviour for row, found in zip(rows, in_order_of(rows, batches, parts), strict=True)]
        self._sums = -float(sum(gap.sum() for gap in gaps)), sum(len(gap) for gap in gaps)
        return [
            replace(row, advantages=(row.advantages if len(row.advantages) else np.zeros(len(gap))) + self._coefficient * gap)
            for row, gap in zip(rows, gaps, strict=True)]

    def metrics(self) -> dict[str, float | None]:
        """teacher_kl: mean log mu - log pi_T over the step's tokens, an estimate of KL(mu || pi_T) per token."""
        total, tokens = (self._ranks.total(value) for value in self._sums)
        return {"teacher_kl": total / tokens if tokens else None}
