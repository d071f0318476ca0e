"""The learner on many ranks: every rank runs these methods together, and rank 0 has the batch and the results.

    rank 0: rows with advantages, from the whole batch ──scatter by cost──► every rank: its micro-batches, as many as the
    longest has (the others idle along) ──► gradients summed over ranks ──► one clip by the global norm ──► AdamW on each shard

The step is `Learner.step`; what it asks of other ranks is world.py's. Here is what a spread model needs besides. A rank of a
tensor-parallel or context group gets the rows of its group. A checkpoint is written shard by shard, by all ranks; a policy
version leaves gathered, on rank 0, as that of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch.distributed import ProcessGroup

from services.trainer import adapters
from services.trainer.learner import Learner
from services.trainer.optimizer import set_learning_rate
from services.trainer.parallel import mesh
from services.trainer.parallel.checkpoints import in_place
from services.trainer.parallel.world import World
from services.trainer.probes import Prober
from services.trainer.snapshot import Allocate, Learning, Snapshot, restore, take
from slipstream import config
from slipstream.config_sections import Lora
from slipstream.errors import ConfigError, InvalidInput
from slipstream.manifest import RawTensor, weights_digest
from slipstream.model import cooked, experts_of, files, raw
from slipstream.probes import Probes


class ShardedLearner(Learner):
    """A `Learner` whose model is spread over the ranks of trainer.parallel. Every method is collective.

    Settings that do not run on many ranks are refused where the run file is read (slipstream/config_ranks.py); raises
    ConfigError, naming the settings, for what does not fit the model.
    """

    def __init__(self, run: config.RunFile, learning_rate: float | None = None) -> None:
        self.world = World(run)
        super().__init__(run, learning_rate, self.world)
        self.device, self.rank = self.world.device, self.world.rank
        self.probe()

    def _prepare(self, built: Any, tokenizer: Any) -> Any:
        self._files = files(built, tokenizer)
        self._tied = set(built.state_dict()) - _first_names(built)
        self._experts = sum(int(m.num_experts) for m in experts_of(built))
        return super()._prepare(built, tokenizer)

    def _attached(self) -> Any:
        """Attached to the spread model: every rank holds A and B whole, made of one seed. Their gradients are added up in
        World.clipped_step. The base is gathered once, on rank 0, for publication.
        """
        if (lora := self.run.model.lora) is None:
            return None
        adapts_whole(self.model, lora, self.run.trainer.parallel)
        base = [raw(name, tensor) for name, tensor in self._gathered(self._own_weights()).items()]
        adapter = adapters.attached(self.model, self.run, base)
        vars(adapter)["digest"] = self.world.told(weights_digest(base))
        return adapter

    def probe(self) -> None:
        """A forward pass on every rank: what cannot run is told at the start."""
        with torch.no_grad():
            self.model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=self.device), use_cache=False)
        self.world.context.verify(self.model, self.vocabulary)
        mesh.reshard(self.model)

    @torch.no_grad()
    def _copy(self, model: Any, first: Sequence[RawTensor] | None) -> None:
        """As `Learner._copy`; `first` is rank 0's, whole, and goes tensor by tensor."""
        own, places = self._own_weights(), model.state_dict(keep_vars=True)
        if self.world.told(first is None):
            for name, tensor in own.items():
                places[name].copy_(tensor)
            return
        given = {tensor.name: tensor for tensor in first or ()}
        if self.world.told([(t.name, tuple(t.shape)) for t in given.values()]) != [(n, tuple(t.shape)) for n, t in own.items()]:
            raise InvalidInput("the first checkpoint is of another model: its tensors differ in name or shape", "MODEL")
        for name, place in ((name, places[name]) for name in own):
            whole = cooked(given[name]).clone() if given else torch.empty(place.shape, dtype=place.dtype)
            dist.broadcast(whole, src=0)
            place.copy_(mesh.laid_out(whole, place))

    def weights(self) -> list[RawTensor]:
        """A snapshot of the weights, on rank 0; elsewhere nothing."""
        if self.adapter:
            return self.adapter.tensors() if self.rank == 0 else []
        return [raw(name, tensor) for name, tensor in self._gathered(self._own_weights()).items()]

    def probes(self) -> Probes:
        """As `Learner.probes`, on every rank the same."""
        if self._prober is None:
            self._prober = Prober(self.model, self.vocabulary, self.run.run.seed, self._experts, self.world.told)
        found = self._prober.score()
        mesh.reshard(self.model)
        return found

    def snapshot(self) -> Snapshot:
        """A copy of this rank's shards, on the host."""
        return take(self._trained, self.optimizer, self.rank, self._learning)

    def allocate(self) -> Allocate:
        """Where this rank's shards of a checkpoint go; `load` puts what was read there in force."""
        return in_place({"weights": self._trained} | ({"critic": self.critic.model} if self.critic else {}), self.rank)

    def load(self, snapshot: Snapshot) -> None:
        """As `Learner.load`, of this rank's shards; their moments are the optimizer's own from then on."""
        if self.adapter:
            adapters.check_base(self.adapter, snapshot)
        restore(self._trained, self.optimizer, snapshot, self.rank, self._learning, copy=False)
        set_learning_rate(self.optimizer, self.run.trainer.learning_rate)
        if self.critic:
            self.critic.restart()
            if not snapshot.critic:
                self.critic.begin(self.model)

    @property
    def background(self) -> ProcessGroup:
        """All ranks, beside the steps."""
        return self.world.background

    @property
    def _learning(self) -> Learning | None:
        return (self.critic.model, self.critic.optimizer) if self.critic else None

    def files(self) -> dict[str, bytes]:
        """Configuration and tokenizer, for a policy version."""
        return self._files | (self.adapter.files() if self.adapter else {})

    def save_pretrained(self, folder: Path) -> None:
        """Gathered and written by rank 0 as an ordinary Hugging Face directory; of an adapter a PEFT directory."""
        if self.adapter is None:
            self.model.save_pretrained(folder, is_main_process=self.rank == 0)
        elif self.rank == 0:  # by hand: PEFT's own writer walks over the sharded base, and that is collective
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: tensor.cpu().contiguous() for name, tensor in self.adapter.state_dict().items()}
            save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            for name, data in self.adapter.files().items():
                (folder / name).write_bytes(data)
        if self.rank == 0:
            self.tokenizer.save_pretrained(folder)

    def close(self) -> None:
        """Give back buffers."""
        self.world.close()

    def _own_weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.model.state_dict(keep_vars=True).items() if name not in self._tied}

    def _gathered(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole CPU tensors on rank 0, one after the other; others take part and keep nothing."""
        found = {}
        for name, tensor in tensors.items():
            full = mesh.whole(tensor.detach())
            if self.world.rank == 0:
                found[name] = full.to("cpu", copy=True)
        return found


def adapts_whole(model: Any, lora: Lora, settings: config.Parallel) -> None:
    """Raises ConfigError for an adapter of experts that are spread over ranks, by whatever name it was asked for."""
    from slipstream.adapters import fused_targets  # needs an extra package

    if settings.experts > 1 and (fused := fused_targets(model, lora)):
        raise ConfigError(
            f"model.lora.targets = {list(lora.targets)} adapts {fused[0]}, and trainer.parallel.experts = {settings.experts} "
            "spreads it over ranks, where PEFT cannot add to it; adapt attention, or set experts = 1")


def _first_names(model: Any) -> set[str]:
    """Names in the state under which a tensor appears first: tied weights are published once."""
    seen: set[int] = set()
    return {name for name, t in model.state_dict(keep_vars=True).items() if not (id(t) in seen or seen.add(id(t)))}
