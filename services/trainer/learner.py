"""The torch side of the trainer: model, optimizer, one batch. Synchronous; one thread owns it.

A batch is one step of the run, one policy version and one point for a checkpoint, whether it is one optimizer step or several
(mini-steps, services.trainer.mini_steps): nobody outside of `step` ever sees the weights between them.

Axes: R rows, T padded tokens, M trained tokens of a micro-batch, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.trainer import adapters, figures, mini_steps, nonfinite
from services.trainer.algorithms.objective import Objective
from services.trainer.critic import Critic
from services.trainer.optimizer import set_learning_rate
from services.trainer.packing import Fill, Group, Microbatch, Row, in_order_of, trained_rows
from services.trainer.policy_steps import PolicySteps
from services.trainer.probes import Prober
from services.trainer.ranks import Alone, Score
from services.trainer.snapshot import Snapshot, restore, take
from services.trainer.teacher import Teacher
from slipstream import config
from slipstream.errors import ConfigError, InvalidInput
from slipstream.manifest import RawTensor
from slipstream.model import files, load_state, state
from slipstream.probes import Probes

Metrics = dict[str, Any]


class Learner:
    """Owns the model and the optimizer of a run. Raises ConfigError when the model cannot be built.

    On many ranks (`ranks`) every rank has one, and every method is collective.
    """

    def __init__(self, run: config.RunFile, learning_rate: float | None = None, ranks: Alone | None = None) -> None:
        if run.rollout.temperature != 1.0:
            raise ConfigError(f"rollout.temperature = {run.rollout.temperature}: the trainer needs 1; remove the setting")
        threads = 1 if run.deterministic else run.trainer.threads
        if threads:
            torch.set_num_threads(threads)
        self.run, self.ranks = run, ranks or Alone(run)
        self._prober: Prober | None = None
        self.model, self.tokenizer = self.ranks.built(run.model, self._prepare)
        self.adapter: Any = self._attached()
        self._trained: Any = adapters.Trained(self.adapter) if self.adapter else self.model
        self.vocabulary = int(self.model.config.get_text_config().vocab_size)
        self.optimizer = self.ranks.optimizer(self.model, learning_rate or run.trainer.learning_rate)
        self.objective = Objective(run.algorithm, run.rollout.max_new_tokens)
        self.policy = PolicySteps(self.model, self.optimizer, self.objective, run, self.ranks)
        self._reference: Score | None = None
        self._teacher = Teacher(run, self.tokenizer, self.ranks) if run.algorithm.teacher else None
        self.critic = Critic(run, self.ranks) if run.algorithm.advantage == "gae" else None
        self._fills: dict[str, Fill] = {"reference": self._with_reference, "values": self._valued, "teacher": self._taught}
        self.skip: nonfinite.Skip | None = None  # of the last step

    def _prepare(self, built: Any, tokenizer: Any) -> Any:
        """See Alone.built."""
        return built

    def _attached(self) -> Any:
        """The adapter of the run, now in the model; None without one."""
        return adapters.attached(self.model, self.run)

    def prepared(self, groups: Sequence[Group], step: int) -> list[Row] | None:
        """The rows of batch `step`, as far as they are known without any model: for `step`, and from any thread meanwhile.

        None when there is nothing to prepare, or when it fails: then `step` says of what.
        """
        if self.objective.kl_in_reward or self.critic:
            return None
        try:
            return self._trained_rows(groups, step)
        except InvalidInput:
            return None

    def _trained_rows(self, groups: Sequence[Group], step: int, *fills: Fill | None) -> list[Row]:
        rows = trained_rows(groups, step, self.objective, *fills, counted=self.run.trainer.mini_steps > 1)
        for row in rows:
            self._known(row.inputs, row.targets)
        return rows

    def step(self, groups: Sequence[Group], step: int, prepared: list[Row] | None = None) -> Metrics:
        """Batch `step`: its optimizer step, or all of its mini-steps. A batch in which no group has a signal changes nothing,
        not even the moments.

        An optimizer step whose loss or gradient is not finite changes nothing either, and the others of the batch stand: `skip`
        then says whose. Raises InvalidInput for malformed samples, with nothing applied. Rank 0 gives the groups, with the rows
        that are `prepared`, and gets the metrics; on other ranks these say nothing.
        """
        several = self.run.trainer.mini_steps > 1
        rows = self.ranks.led(lambda filled: self._rows(groups, step, filled, prepared), self._fills)
        if malformed := self.ranks.told(nonfinite.recorded(rows)):
            return self._skipped(groups, step, nonfinite.Skip(malformed))
        plan = self.ranks.told(mini_steps.plan(rows, self.objective, self.run, step)) if several else []
        if several and self.critic is None:
            rows = [row for row in rows if self.objective.moves(row.advantages)]
        trained_tokens, rows = sum(len(row.index) for row in rows), self.ranks.shared(rows)
        warming = self.critic is not None and step <= self.run.critic.warmup_steps
        if plan and not warming:
            rows = self.policy.before(rows)
        parts = [] if warming else [mini_steps.part(rows, weights) for weights in plan] if several else [rows]
        applied, skips = self.policy.take(parts, step)
        if skips and not applied:
            return self._skipped(groups, step, nonfinite.together(skips, len(parts)), len(skips))
        self.skip = nonfinite.together(skips, len(parts)) if skips else None
        learnt = self.critic.update(rows, step) if self.critic else {}
        before = [asked for part in self.ranks.gathered(figures.asked(rows)) for asked in part] if plan else []
        return {
            **figures.batch_metrics(groups, step, self.objective.compares),
            **figures.of_batch(applied, before, self.run.algorithm, several),
            **self.policy.metrics(applied), **learnt,
            **(self._teacher.metrics() if self._teacher else {}), "trained_tokens": trained_tokens,
            "learning_rate": self.optimizer.param_groups[0]["lr"], "skipped": len(skips),
            **({"nonfinite_samples": self.skip.samples} if self.skip else {}),
        }

    def _rows(
        self, groups: Sequence[Group], step: int, filled: Callable[[str], Fill], rows: list[Row] | None,
    ) -> list[Row]:
        """The batch's rows, if not `prepared`, with all that other models say of them. `filled(name)` is one of `_fills`."""
        if rows is None:
            rows = self._trained_rows(groups, step, filled("reference"), filled("values") if self.critic else None)
        if self.objective.kl_in_loss:
            rows = filled("reference")(rows)
        return filled("teacher")(rows) if self._teacher and not nonfinite.recorded(rows) else rows

    def _skipped(self, groups: Sequence[Group], step: int, skip: nonfinite.Skip, count: int = 1) -> Metrics:
        """Metrics of a batch of which nothing was applied, none of `count` optimizer steps: those of one without signal."""
        seen = figures.batch_metrics(groups, step, self.objective.compares)
        metrics = self.step([], step) | seen | {"skipped": count, "nonfinite_samples": skip.samples}
        self.skip = skip
        return metrics

    def supervised_step(self, rows: Sequence[Row], learning_rate: float, what: str) -> float:
        """-mean log pi(target) over the rows' targets, one optimizer step. Returns the loss."""
        with self.ranks.together():
            for row in rows:
                self._known(row.inputs, row.targets)
        tokens, loss = self.ranks.told(sum(len(row.index) for row in rows)), 0.0
        set_learning_rate(self.optimizer, learning_rate)
        for batch in self.ranks.microbatches(self.ranks.shared(rows), self.run.trainer.tokens_per_microbatch):
            logprobs_M, _ = self.forward(batch)
            share = -logprobs_M.sum() / max(tokens, 1)
            (share * self.ranks.scale).backward()
            loss += share.item()
        self.ranks.clipped_step(self.optimizer, self.model, self.run.trainer.max_grad_norm, what)
        return self.ranks.total(loss)

    def forward(self, batch: Microbatch, entropy_gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the targets (with gradient) and entropies: two [M]. Raises InvalidInput for unknown tokens."""
        self._known(batch.inputs, batch.targets)
        return self.policy.forward(batch, entropy_gradient)

    def _taught(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with the teacher's part added to their advantages."""
        assert self._teacher is not None
        return self._teacher.taught(rows)

    def _valued(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with the critic's values."""
        assert self.critic is not None
        for row in rows:
            self._known(row.inputs, row.targets)
        return self.critic.valued(rows)

    def _known(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        if inputs.size and not (inputs.min() >= 0 and max(inputs.max(), targets.max(initial=0)) < self.vocabulary):
            raise InvalidInput(f"a token is outside of the model's 0..{self.vocabulary - 1}", "TOKEN", field="tokens")

    def start_reference(self, first: Sequence[RawTensor] | None = None) -> None:
        """Load the reference model of a KL term: a directory, else `first`, the weights of step 0, else those of now.

        An adapter's is its base, which is there already.
        """
        algorithm = self.run.algorithm
        if self.adapter is not None and not algorithm.reference:
            self._reference = adapters.without(self.adapter, self.policy.score)
            return
        settings = config.Model(path=algorithm.reference, dtype=self.run.model.dtype) if algorithm.reference else self.run.model
        model, _ = self.ranks.built(settings)
        if not algorithm.reference:
            self._copy(model, first)
        self._reference = self.ranks.scorer(model.requires_grad_(False))

    def _copy(self, model: Any, first: Sequence[RawTensor] | None) -> None:
        """Give a model of the policy's shape the weights `first`, else those of now."""
        load_state(model, first or self.weights())

    @torch.no_grad()
    def _with_reference(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with their log-probabilities under the reference model."""
        assert self._reference is not None, "start_reference was not called"
        batches = self.ranks.microbatches(rows, self.run.trainer.tokens_per_microbatch)
        parts = [self._reference(batch)[0].float().cpu().numpy() for batch in batches]
        return [replace(row, reference=found) for row, found in zip(rows, in_order_of(rows, batches, parts), strict=True)]

    def start_rl(self, keep_optimizer: bool) -> None:
        """End of the warm-up: the run's learning rate, and fresh moments unless they are to be kept."""
        if not keep_optimizer:
            self.optimizer.state.clear()
        set_learning_rate(self.optimizer, self.run.trainer.learning_rate)
        if self.critic:
            self.critic.begin(self.model)

    def weights(self) -> list[RawTensor]:
        """A snapshot of the weights, for a policy version."""
        return self.adapter.tensors() if self.adapter else state(self.model)

    def probes(self) -> Probes:
        """What the weights of now say of the probes, for a policy version."""
        if self._prober is None:
            self._prober = Prober(self.model, self.vocabulary, self.run.run.seed)
        return self._prober.score()

    def base(self) -> Sequence[RawTensor]:
        """The weights that versions of an adapter go on from; empty without an adapter."""
        return self.adapter.base if self.adapter else ()

    def snapshot(self) -> Snapshot:
        """A copy of everything that a step changes, for a checkpoint."""
        return take(self._trained, self.optimizer, critic=self.critic and (self.critic.model, self.critic.optimizer))

    def load(self, snapshot: Snapshot) -> None:
        """The inverse of `snapshot`. Raises InvalidInput when it does not fit the model.

        From a checkpoint without a critic (a run forked from one without) the critic starts as at step 0, from these weights.
        """
        if self.adapter:
            adapters.check_base(self.adapter, snapshot)
        restore(self._trained, self.optimizer, snapshot, critic=self.critic and (self.critic.model, self.critic.optimizer))
        set_learning_rate(self.optimizer, self.run.trainer.learning_rate)
        if self.critic:
            self.critic.restart()
            if not snapshot.critic:
                self.critic.begin(self.model)

    def leave_device(self) -> None:
        """Move models and optimizers to host memory: others have the device next. Snapshots may be taken meanwhile."""
        self.ranks.leave_device()

    def enter_device(self) -> None:
        """The inverse; before anything else is asked for."""
        self.ranks.enter_device()

    def files(self) -> dict[str, bytes]:
        """Configuration and tokenizer, for a policy version."""
        return files(self.model, self.tokenizer) | (self.adapter.files() if self.adapter else {})

    def save_pretrained(self, folder: Path) -> None:
        """Write an ordinary Hugging Face directory; of an adapter a PEFT directory, and the sum below it when wanted."""
        if self.adapter is None:
            self.model.save_pretrained(folder)
        else:
            self.adapter.save_pretrained(folder)
            if self.run.model.lora and self.run.model.lora.save_merged:
                self.adapter.save_pretrained(folder / "merged", merged=True)
                self.tokenizer.save_pretrained(folder / "merged")
        self.tokenizer.save_pretrained(folder)
