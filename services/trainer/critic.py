"""The critic of PPO: what the policy may expect from each token on, learnt beside it.

A backbone of its own, of the policy's family, and a linear head to one number: V(s_t), with s_t everything before token t, is
read at the position that predicts token t. The head starts at zero; the backbone starts as the policy's of step 0, after a
warm-up, or as `critic.path`. It has its own optimizer, learning rate and gradient norm, and its own parts in every checkpoint.

Each step: values of the batch before anything changes (V_old) -> GAE -> the policy's step -> `critic.updates` steps of the
critic on the returns. Denominators are of the whole step: the gradient is the same for every split into micro-batches.

Axes: R rows, T padded tokens, H hidden, M trained tokens of a micro-batch, N of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from services.trainer.algorithms.policy_losses import value_loss
from services.trainer.optimizer import NonFinite, set_learning_rate
from services.trainer.packed_attention import laid
from services.trainer.packing import Microbatch, Row, in_order_of
from services.trainer.ranks import Alone
from slipstream import config, logs

log = logs.get("trainer.critic")


class ValueModel(nn.Module):
    """A backbone without its output embedding, and a head from its `width` to one number per position."""

    def __init__(self, backbone: Any, width: int) -> None:
        super().__init__()
        self.backbone = backbone
        first = next(backbone.parameters())
        self.head = nn.Linear(width, 1, device=first.device, dtype=torch.promote_types(first.dtype, torch.float32))
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, inputs_R_T: torch.Tensor, index_M: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        """Values at the positions `index_M` = row x T + position: [M], in the precision of the head."""
        hidden_R_T_H = self.backbone(input_ids=inputs_R_T, use_cache=False, **more).last_hidden_state
        hidden_M_H = hidden_R_T_H.reshape(-1, hidden_R_T_H.shape[-1]).index_select(0, index_M)
        return self.head(hidden_M_H.to(self.head.weight.dtype)).squeeze(-1).clone()  # FSDP wants no view


class Critic:
    """Owns the value model and its optimizer. Raises ConfigError when the model cannot be built."""

    def __init__(self, run: config.RunFile, ranks: Alone) -> None:
        self.settings, self._budget, self._ranks = run.critic, run.trainer.tokens_per_microbatch, ranks
        start = run.model
        if run.critic.path:
            start = config.Model(path=run.critic.path, dtype=run.model.dtype, experts=run.model.experts)
        width = 0

        def headless(causal: Any, _: Any) -> Any:
            nonlocal width
            width = causal.get_output_embeddings().weight.shape[1]
            return causal.base_model

        backbone, _ = ranks.built(start, headless)
        self.model: Any = ranks.completed(ValueModel(backbone, width).eval())
        self.optimizer = ranks.optimizer(self.model, run.critic.learning_rate)

    def begin(self, policy: Any) -> None:
        """Before the first step: the backbone takes the policy's weights, unless `critic.path` gave it some."""
        if not self.settings.path:
            self.model.backbone.load_state_dict(policy.base_model.state_dict())

    @torch.no_grad()
    def valued(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with what the critic expects at each trained token, before this step's updates."""
        batches = self._ranks.microbatches(rows, self._budget)
        parts = [self._values(batch).double().cpu().numpy() for batch in batches]
        return [replace(row, values=values) for row, values in zip(rows, in_order_of(rows, batches, parts), strict=True)]

    def update(self, rows: Sequence[Row], step: int) -> dict[str, float | None]:
        """`critic.updates` optimizer steps on the returns of this rank's rows; metrics of the last. No row may have weight 0.

        A step whose loss or gradient is not finite is left out, with a warning and `value_skipped` = 1.
        """
        batches = self._ranks.microbatches(rows, self._budget)
        if not batches:
            nothing: dict[str, float | None] = dict.fromkeys(METRICS)
            return nothing | {"value_skipped": 0}
        tokens = int(self._ranks.total(sum(len(row.index) for row in rows)))
        parts = self._ranks.gathered([(row.values, row.outcomes) for row in rows])
        found: dict[str, float | None] = dict(explained([pair for part in parts for pair in part])) | {"value_skipped": 0}
        for _ in range(self.settings.updates):
            loss, clipped = 0.0, 0
            for batch in batches:
                values_M = self._values(batch)
                former_M, returns_M = (_like(a, values_M) for a in (batch.values, batch.returns))
                share = value_loss(values_M, returns_M, former_M, self.settings.clip or float("inf")).sum() / tokens
                (share * self._ranks.shares).backward()  # every rank has whole rows
                loss += share.item()
                clipped += int(((values_M.detach() - former_M).abs() > (self.settings.clip or float("inf"))).sum())
            loss, clipped = self._ranks.total(loss), self._ranks.total(clipped)
            try:
                norm = self._ranks.clipped_step(
                    self.optimizer, self.model, self.settings.max_grad_norm, f"the critic at batch {step}", loss)
            except NonFinite as error:
                log.warning(error.message, batch=step)
                return found | {"value_loss": None, "critic_grad_norm": None, "value_clip_share": None, "value_skipped": 1}
            found |= {"value_loss": loss, "critic_grad_norm": norm, "value_clip_share": clipped / tokens}
        return found

    def restart(self) -> None:
        """After a load: the run's learning rate, not that of the checkpoint's run."""
        set_learning_rate(self.optimizer, self.settings.learning_rate)

    def _values(self, batch: Microbatch) -> torch.Tensor:
        device = self.model.head.weight.device
        with laid(batch, device) as more:
            return self.model(torch.from_numpy(batch.inputs).to(device), torch.from_numpy(batch.index).to(device), **more)


METRICS = ("value_loss", "value_mean", "value_clip_share", "explained_variance", "critic_grad_norm")


def explained(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float | None]:
    """explained_variance = 1 - Var(G - V_old) / Var(G) over the step's tokens, G what really came (discounted, without lambda);
    None when nothing varies. value_mean: mean V_old. `pairs`: V_old and G of each row."""
    if not pairs:  # not rank 0
        return {"value_mean": None, "explained_variance": None}
    values_N, outcomes_N = (np.concatenate(part) for part in zip(*pairs, strict=True))
    variance = float(outcomes_N.var())
    return {
        "value_mean": float(values_N.mean()),
        "explained_variance": 1 - float((outcomes_N - values_N).var()) / variance if variance > 0 else None}


def _like(values: np.ndarray, other: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(other)
