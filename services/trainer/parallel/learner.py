"""The learner on many ranks: every rank runs these methods together, and rank 0 has the batch and the results.

    rank 0: rows with advantages, from the whole batch ──scatter by cost──► every rank: its micro-batches, as many as the
    longest has (the others idle along) ──► gradients summed over ranks ──► one clip by the global norm ──► AdamW on each shard

A rank of a tensor-parallel group gets the rows of its group. Weights, moments and versions leave gathered, on rank 0, so that
publication and checkpoints are those of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from services.trainer import diagnostics, nonfinite
from services.trainer.algorithms.objective import Objective
from services.trainer.learner import Learner, Metrics, _joined, _loss_inputs, batch_metrics
from services.trainer.logprobs import log_probabilities
from services.trainer.optimizer import NonFinite, set_learning_rate
from services.trainer.packing import Group, Microbatch, Row, microbatches, trained_rows
from services.trainer.parallel import mesh
from services.trainer.parallel.partition import cost, idle_row, partition
from services.trainer.probes import Prober
from services.trainer.snapshot import MASTER, MOMENTS, Snapshot
from slipstream import config
from slipstream.errors import ConfigError, InvalidInput
from slipstream.manifest import RawTensor
from slipstream.model import build, files, raw
from slipstream.probes import Probes


class ShardedLearner(Learner):
    """A `Learner` whose model is spread over the ranks of trainer.parallel. Every method is collective.

    Raises ConfigError, naming the settings, for what does not run on many ranks.
    """

    def __init__(self, run: config.RunFile, learning_rate: float | None = None) -> None:
        refuse(run)
        settings = run.trainer.parallel
        self.run = run
        torch.set_num_threads(run.trainer.threads or torch.get_num_threads())
        built: Any
        built, self.tokenizer = build(run.model, run.run.seed, run.deterministic)
        self._files = files(built, self.tokenizer)
        self._tied = set(built.state_dict()) - _first_names(built)
        self.vocabulary = int(built.config.get_text_config().vocab_size)
        self._prober = Prober(built.eval(), self.vocabulary, run.run.seed)  # counts experts while each rank has them all
        self.device = mesh.join(settings)
        self.rank = dist.get_rank()
        self.model, self._exchanges = mesh.distribute(built, run, self.device)
        self.adapter = self.critic = None
        self.skip: nonfinite.Skip | None = None
        self.hidden = int(self.model.config.get_text_config().hidden_size)
        self.optimizer = mesh.optimizer(self.model, run.trainer, learning_rate or run.trainer.learning_rate)
        self.objective = Objective(run.algorithm, run.rollout.max_new_tokens)
        self.shares = settings.ranks // settings.tensor
        self._index_M: torch.Tensor | None = None
        self.model.get_output_embeddings().register_forward_pre_hook(self._select)
        self.probe()

    def probe(self) -> None:
        """A forward pass on every rank: what cannot run is told at the start."""
        with torch.no_grad():
            self.model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=self.device), use_cache=False)

    def step(self, groups: Sequence[Group], step: int) -> Metrics:
        """As `Learner.step`. Rank 0 gives the groups, others anything; the metrics are whole on rank 0 alone."""
        rows = trained_rows(groups, step, self.objective) if self.rank == 0 else []
        malformed = nonfinite.recorded(rows)
        batches, _, trained = self._shared([] if malformed else rows)
        parts, loss = [], 0.0
        for batch in batches:
            logprobs_M, entropy_M = self.forward(batch, bool(self.run.algorithm.entropy_coefficient))
            inputs = _loss_inputs(batch, logprobs_M, entropy_M)
            share = self.objective.loss(inputs)
            (share * self.shares).backward()
            loss += share.item()
            parts.append(_observed(batch, logprobs_M.detach().cpu(), entropy_M.detach().cpu()))
        loss, seen = self._total(loss), self._collected(parts)
        self.skip, norm = nonfinite.Skip(malformed) if malformed else None, 0.0
        try:
            if batches:
                norm = mesh.clipped_step(self.optimizer, self.model, self.run.trainer.max_grad_norm, f"batch {step}", loss)
        except NonFinite:
            self.skip = nonfinite.Skip(())
        if self.skip:
            loss, seen, trained = 0.0, [], 0
        ratios, advantages, fresh, entropies = ([p[i] for p in seen] for i in range(4))
        skipped = {"skipped": 1, "nonfinite_samples": self.skip.samples} if self.skip else {"skipped": 0}
        return {
            **batch_metrics(groups if self.rank == 0 else [], step),
            **diagnostics.divergence(
                _joined(ratios), _joined(advantages), _joined(fresh, bool), self.run.algorithm.clip_low,
                self.run.algorithm.clip_high),
            "loss": loss, "grad_norm": norm, "trained_tokens": trained, "microbatches": len(batches) * self.shares,
            "entropy": float(_joined(entropies).mean()) if seen else 0.0,
            "learning_rate": self.optimizer.param_groups[0]["lr"], **skipped,
        }

    def supervised_step(self, rows: Sequence[Row], learning_rate: float, what: str) -> float:
        """As `Learner.supervised_step`; rank 0 gives the rows."""
        set_learning_rate(self.optimizer, learning_rate)
        batches, own, tokens = self._shared(rows)
        loss = 0.0
        for number, batch in enumerate(batches):
            logprobs_M, _ = self.forward(batch)
            share = -logprobs_M.sum() * (number < own) / max(tokens, 1)
            (share * self.shares).backward()
            loss += share.item()
        mesh.clipped_step(self.optimizer, self.model, self.run.trainer.max_grad_norm, what)
        return self._total(loss)

    def forward(self, batch: Microbatch, entropy_gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Learner.forward`. The output embedding sees the trained positions alone, in one piece."""
        self._known(batch.inputs, batch.targets)
        self._index_M = torch.from_numpy(batch.index).to(self.device)
        try:
            found = self.model(input_ids=torch.from_numpy(batch.inputs).to(self.device), use_cache=False)
        finally:
            self._index_M = None
        targets_M = torch.from_numpy(batch.targets).to(self.device)
        return log_probabilities(mesh.whole(found.logits)[0], targets_M, entropy_gradient)

    def start_reference(self, first: Sequence[RawTensor] | None = None) -> None:
        """`refuse` has refused what needs one."""

    def weights(self) -> list[RawTensor]:
        """A snapshot of the weights, on rank 0; elsewhere nothing."""
        return [raw(name, tensor) for name, tensor in self._gathered(self._own_weights()).items()]

    def probes(self) -> Probes:
        """As `Learner.probes`, on every rank the same."""
        assert self._prober is not None
        return self._prober.score()

    def base(self) -> Sequence[RawTensor]:
        """There is no adapter."""
        return ()

    def snapshot(self) -> Snapshot:
        """Whole tensors, on rank 0; elsewhere an empty one."""
        moments = {
            f"{name}/{moment}": self.optimizer.state[parameter][moment] for name, parameter in self.model.named_parameters()
            if parameter in self.optimizer.state for moment in (*MOMENTS, MASTER)
            if moment in self.optimizer.state[parameter]}
        return Snapshot(
            self._gathered(self._own_weights()), self._gathered(moments),
            {"0/torch": torch.get_rng_state()} if self.rank == 0 else {})

    @torch.no_grad()
    def load(self, snapshot: Snapshot | None) -> None:
        """From rank 0's snapshot, written on any mesh. Raises InvalidInput, on all ranks, when it does not fit the model."""
        own, parameters = self._own_weights(), dict(self.model.named_parameters())
        [weights, moments] = self._told([snapshot.weights, snapshot.optimizer] if snapshot else [{}, {}])
        if weights.keys() != own.keys() or any(weights[n].shape != own[n].shape for n in own):
            raise InvalidInput("the checkpoint is of another model: its tensors differ in name or shape", "MODEL")
        for name, tensor in weights.items():
            own[name].copy_(mesh.laid_out(tensor, own[name]))
        self.optimizer.state.clear()
        for key, tensor in moments.items():
            name, _, moment = key.rpartition("/")
            place = tensor if moment == "step" else mesh.laid_out(tensor, parameters[name])
            self.optimizer.state[parameters[name]][moment] = place.clone()
        set_learning_rate(self.optimizer, self.run.trainer.learning_rate)

    def files(self) -> dict[str, bytes]:
        """Configuration and tokenizer, for a policy version."""
        return self._files

    def save_pretrained(self, folder: Path) -> None:
        """Gathered and written by rank 0 as an ordinary Hugging Face directory."""
        self.model.save_pretrained(folder, is_main_process=self.rank == 0)
        if self.rank == 0:
            self.tokenizer.save_pretrained(folder)

    def close(self) -> None:
        """Give back buffers."""
        self._exchanges.close()

    def _select(self, _: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Before the output embedding: [R, T, H] -> [1, M, H], the trained positions."""
        if self._index_M is None:
            return None
        hidden = inputs[0]
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._index_M)[None], *inputs[1:])

    def _shared(self, rows: Sequence[Row]) -> tuple[list[Microbatch], int, int]:
        """(This rank's micro-batches, as many on each rank; how many are not idle; trained tokens of all ranks)."""
        parts = partition([cost(len(row.inputs), self.hidden) for row in rows], self.shares)
        tensor = self.run.trainer.parallel.tensor
        given = [[rows[i] for i in parts[rank // tensor]] for rank in range(self.run.trainer.parallel.ranks)]
        received: list[Any] = [None]
        tokens = sum(len(row.index) for row in rows)
        dist.scatter_object_list(received, [(part, tokens) for part in given] if self.rank == 0 else None, src=0)
        mine, tokens = received[0]
        batches = microbatches(mine, self.run.trainer.tokens_per_microbatch)
        most = torch.tensor([len(batches)])
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=_host_group())
        idle = microbatches([idle_row()], 1)
        return batches + idle * (int(most) - len(batches)), len(batches), tokens

    def _total(self, value: float) -> float:
        """Sum over the shares of the batch."""
        total = torch.tensor([value / self.run.trainer.parallel.tensor], dtype=torch.float64)
        dist.all_reduce(total, group=_host_group())
        return float(total)

    def _collected(self, parts: list[tuple[np.ndarray, ...]]) -> list[tuple[np.ndarray, ...]]:
        """On rank 0 those of one rank of each tensor-parallel group; elsewhere nothing."""
        found: list[Any] | None = [None] * self.run.trainer.parallel.ranks if self.rank == 0 else None
        dist.gather_object(parts, found, dst=0)
        return [p for rank in (found or [])[:: self.run.trainer.parallel.tensor] for p in rank if len(p[0])]

    def _told(self, value: list[Any]) -> list[Any]:
        """Rank 0's."""
        dist.broadcast_object_list(value, src=0)
        return value

    def _own_weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.model.state_dict(keep_vars=True).items() if name not in self._tied}

    def _gathered(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole CPU tensors on rank 0, one after the other; others take part and keep nothing."""
        found = {}
        for name, tensor in tensors.items():
            full = mesh.whole(tensor.detach())
            if self.rank == 0:
                found[name] = full.to("cpu", copy=True)
        return found


def refuse(run: config.RunFile) -> None:
    """Raises ConfigError for settings that do not run on many ranks: by name, before anything is started."""
    refused = [
        (run.algorithm.advantage == "gae", "algorithm.advantage = gae (a critic)"),
        (run.algorithm.kl != "none", f"algorithm.kl = {run.algorithm.kl} (a reference model)"),
        (bool(run.algorithm.teacher), "algorithm.teacher"),
        (run.model.lora is not None, "model.lora"),
        (bool(run.algorithm.balance_coefficient or run.algorithm.router_z_coefficient),
         "algorithm.balance_coefficient and router_z_coefficient"),
        (run.rollout.capture_routes and run.algorithm.route_replay != "none",
         f"algorithm.route_replay = {run.algorithm.route_replay} with rollout.capture_routes"),
        (run.deterministic, "schedule.deterministic"),
    ]
    if found := [what for broken, what in refused if broken]:
        raise ConfigError(
            f"trainer.parallel.ranks = {run.trainer.parallel.ranks} does not go together with {', '.join(found)} yet; "
            "set ranks = 1, or change the other")


def _observed(batch: Microbatch, logprobs_M: torch.Tensor, entropy_M: torch.Tensor) -> tuple[np.ndarray, ...]:
    """What metrics are made of, of the tokens that count."""
    counted = batch.weights > 0
    ratios = logprobs_M.numpy() - batch.behaviour
    return tuple(values[counted] for values in (ratios, batch.advantages, batch.fresh, entropy_M.numpy()))


def _first_names(model: Any) -> set[str]:
    """Names in the state under which a tensor appears first: tied weights are published once."""
    seen: set[int] = set()
    return {name for name, t in model.state_dict(keep_vars=True).items() if not (id(t) in seen or seen.add(id(t)))}


def _host_group() -> dist.ProcessGroup | None:
    """Small numbers travel on the host; the default group has a gloo backend beside NCCL."""
    return dist.group.WORLD
