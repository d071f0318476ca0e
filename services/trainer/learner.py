"""The torch side of the trainer: model, optimizer, one step. Synchronous; one thread owns it.

Axes: R rows, T padded tokens, M trained tokens of a micro-batch, H hidden, V vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.trainer import losses
from services.trainer.optimizer import adamw, clipped_step, set_learning_rate
from services.trainer.packing import Group, Microbatch, Row, lag_histogram, microbatches, trained_rows, without_signal
from services.trainer.snapshot import Snapshot, restore, take
from slipstream import config
from slipstream.errors import ConfigError, InvalidInput
from slipstream.manifest import RawTensor
from slipstream.model import build, files, state

Metrics = dict[str, Any]


class Learner:
    """Owns the model and the optimizer of a run. Raises ConfigError when the model cannot be built."""

    def __init__(self, run: config.RunFile, learning_rate: float | None = None) -> None:
        if run.rollout.temperature != 1.0:
            raise ConfigError(f"rollout.temperature = {run.rollout.temperature}: the trainer needs 1; remove the setting")
        threads = 1 if run.deterministic else run.trainer.threads
        if threads:
            torch.set_num_threads(threads)
        self.run = run
        self.model: Any
        self.model, self.tokenizer = build(run.model, run.run.seed, run.deterministic)
        # Evaluation mode: dropout and router jitter would make the trainer's distribution differ from the sampler's.
        self.model.eval()
        self.vocabulary = int(self.model.config.get_text_config().vocab_size)
        self.optimizer = adamw(self.model, run.trainer, learning_rate or run.trainer.learning_rate)
        self._index_M: torch.Tensor | None = None
        self.model.get_output_embeddings().register_forward_pre_hook(self._select)

    def step(self, groups: Sequence[Group], step: int) -> Metrics:
        """Optimizer step `step` on a batch. A batch in which no group has a signal changes nothing, not even the moments.

        Raises InvalidInput for malformed samples and SlipstreamError for a non-finite gradient, both with nothing applied.
        """
        algorithm = self.run.algorithm
        rows = trained_rows(groups, step, algorithm.normalize_std)
        batches = microbatches(rows, self.run.trainer.tokens_per_microbatch)
        tokens = sum(len(row.index) for row in rows)
        loss, entropies, ratios, grad_norm = 0.0, [], [], 0.0
        for batch in batches:
            logprobs_M, entropy_M = self.forward(batch)
            behaviour_M = torch.from_numpy(batch.behaviour).to(logprobs_M)
            advantages_M = torch.from_numpy(batch.advantages).to(logprobs_M)
            share = losses.token_mean(losses.clipped_policy_loss(
                logprobs_M, behaviour_M, advantages_M, algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip), tokens)
            share.backward()
            loss += share.item()
            entropies.append(entropy_M.numpy())
            ratios.append((logprobs_M.detach() - behaviour_M).numpy())
        if batches:
            grad_norm = clipped_step(self.optimizer, self.model.parameters(), self.run.trainer.max_grad_norm, f"batch {step}")
        advantages = _joined([b.advantages for b in batches])
        return {
            **batch_metrics(groups, step),
            **losses.divergence(
                _joined(ratios), advantages, _joined([b.lags for b in batches]), algorithm.clip_low, algorithm.clip_high),
            "loss": loss, "grad_norm": grad_norm, "trained_tokens": tokens, "microbatches": len(batches),
            "entropy": float(_joined(entropies).mean()) if tokens else 0.0,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }

    def supervised_step(self, rows: Sequence[Row], learning_rate: float, what: str) -> float:
        """-mean log pi(target) over the rows' targets, one optimizer step. Returns the loss."""
        tokens, loss = sum(len(row.index) for row in rows), 0.0
        set_learning_rate(self.optimizer, learning_rate)
        for batch in microbatches(rows, self.run.trainer.tokens_per_microbatch):
            logprobs_M, _ = self.forward(batch)
            share = losses.token_mean(-logprobs_M, tokens)
            share.backward()
            loss += share.item()
        clipped_step(self.optimizer, self.model.parameters(), self.run.trainer.max_grad_norm, what)
        return loss

    def forward(self, batch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the targets (with gradient) and entropies: two [M]. Raises InvalidInput for unknown tokens."""
        if len(batch.inputs) and not (
                batch.inputs.min() >= 0 and max(batch.inputs.max(), batch.targets.max()) < self.vocabulary):
            raise InvalidInput(f"a token is outside of the model's 0..{self.vocabulary - 1}", "TOKEN", field="tokens")
        device = self.model.device
        self._index_M = torch.from_numpy(batch.index).to(device)
        try:
            logits_M_V = self.model(input_ids=torch.from_numpy(batch.inputs).to(device), use_cache=False).logits[0]
        finally:
            self._index_M = None
        return losses.log_probabilities(logits_M_V, torch.from_numpy(batch.targets).to(device))

    def start_rl(self, keep_optimizer: bool) -> None:
        """End of the warm-up: the run's learning rate, and fresh moments unless they are to be kept."""
        if not keep_optimizer:
            self.optimizer.state.clear()
        set_learning_rate(self.optimizer, self.run.trainer.learning_rate)

    def weights(self) -> list[RawTensor]:
        """A snapshot of the weights, for a policy version."""
        return state(self.model)

    def snapshot(self) -> Snapshot:
        """A copy of everything that a step changes, for a checkpoint."""
        return take(self.model, self.optimizer)

    def load(self, snapshot: Snapshot) -> None:
        """The inverse of `snapshot`. Raises InvalidInput when it does not fit the model."""
        restore(self.model, self.optimizer, snapshot)
        set_learning_rate(self.optimizer, self.run.trainer.learning_rate)

    def files(self) -> dict[str, bytes]:
        """Configuration and tokenizer, for a policy version."""
        return files(self.model, self.tokenizer)

    def save_pretrained(self, folder: Path) -> None:
        """Write an ordinary Hugging Face directory."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def _select(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Before the output embedding: keep only the positions that are trained, [R, T, H] -> [1, M, H]."""
        if self._index_M is None:
            return None
        hidden = inputs[0]
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._index_M).unsqueeze(0), *inputs[1:])


def batch_metrics(groups: Sequence[Group], step: int) -> Metrics:
    """What a batch is like, before anything is trained on it."""
    samples = [m for g in groups for m in g.members]
    rewards = [m.reward for m in samples]
    lags = lag_histogram(groups, step)
    generated = sum(lags.values())
    return {
        "reward_mean": statistics.fmean(rewards) if rewards else 0.0,
        "groups": len(groups), "samples": len(samples), "groups_without_signal": without_signal(groups),
        "tokens": sum(m.sample.tokens for m in samples), "generated_tokens": generated,
        "lag_mean": sum(lag * n for lag, n in lags.items()) / max(generated, 1), "lag_max": max(lags, default=0),
        "lags": {str(lag): lags[lag] for lag in sorted(lags)},
    }


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0)
