"""Two ranks of a sharded trainer in miniature, over gloo: started by test_checkpoint_ranks.py as `python two_ranks.py FOLDER`.

Prints one JSON object with what was found. Every rank runs `rank_main`; the parent then looks at the checkpoints alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from services.trainer.checkpoint import Checkpoints
from services.trainer.snapshot import restore, shards_of, take
from slipstream.errors import Unavailable
from slipstream.objects import FileStore

RANKS = 2


class Trainer:
    """A model whose rows do not divide by two, AdamW, and a step that draws noise from torch's generator."""

    def __init__(self, rank: int, seed: int, sharded: bool = True) -> None:
        torch.manual_seed(seed + rank)
        self.rank = rank
        self.model: nn.Module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))
        if sharded:
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)

    def step(self, number: int) -> None:
        inputs = torch.rand(4, 6) + number * (self.rank + 1)
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        """Hash of this rank's weights, moments and generator."""
        snapshot, digest = take(self.model, self.optimizer, self.rank), hashlib.sha256()
        for part in (snapshot.weights, snapshot.optimizer, snapshot.random):
            for name, tensor in part.items():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                digest.update(name.encode() + local.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def full(self) -> dict[str, list]:
        """All weights, gathered."""
        state = self.model.state_dict()
        return {name: (t.full_tensor() if isinstance(t, DTensor) else t).tolist() for name, t in state.items()}


class FailingStore(FileStore):
    """A disk that is full when shards are written."""

    async def put(self, key, data, durable=True):
        raise Unavailable("the disk of this rank is full")


async def saved(checkpoints: Checkpoints, trainer: Trainer, step: int) -> str:
    """The checkpoint's name, or the error."""
    try:
        header = await checkpoints.save(
            take(trainer.model, trainer.optimizer, trainer.rank), step=step, incarnation=1, ledger_sequence=step)
        return header.name
    except Unavailable as error:
        return error.message


async def restored(checkpoints: Checkpoints, trainer: Trainer) -> int:
    """Fill the trainer from the checkpoint in force. Returns its step."""
    await checkpoints.open()
    loaded = await checkpoints.load(shards_of(trainer.model, trainer.rank))
    assert loaded is not None
    restore(trainer.model, trainer.optimizer, loaded[1], trainer.rank)
    return loaded[0].step


async def rank_main(rank: int, folder: Path) -> dict[str, object]:
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    group = distributed.new_group()
    store, found = FileStore(folder / "objects"), {}
    checkpoints = Checkpoints(store, "ranks", 2, group)
    await checkpoints.open()
    if rank == 0:
        await checkpoints.take_over(1)
    distributed.barrier()

    undisturbed = Trainer(rank, seed=1)
    for number in (1, 2):
        undisturbed.step(number)
    found["name"] = await saved(checkpoints, undisturbed, 2)
    found["full"], found["at_2"] = undisturbed.full(), undisturbed.digest()
    for number in (3, 4):
        undisturbed.step(number)
    found["undisturbed"] = undisturbed.digest()

    resumed = Trainer(rank, seed=99)
    found["step"] = await restored(Checkpoints(store, "ranks", 2, group), resumed)
    found["resumed_at_2"] = resumed.digest()
    for number in (3, 4):
        resumed.step(number)
    found["resumed"] = resumed.digest()

    broken = Checkpoints(FailingStore(store.url[7:]) if rank == 1 else store, "ranks", 2, group)
    await broken.open()
    found["broken"] = await saved(broken, resumed, 4)
    found["after_broken"] = (await checkpoints.open()).step
    distributed.barrier()

    other = Trainer(rank, seed=5)  # one process wrote this one
    await restored(Checkpoints(FileStore(folder / "one"), "ranks", 2, group), other)
    found["from_one"] = other.full()
    distributed.destroy_process_group()
    return found


async def alone(folder: Path) -> dict[str, list]:
    """What one process makes of the checkpoint of two; it then writes one of its own."""
    trainer = Trainer(0, seed=7, sharded=False)
    await restored(Checkpoints(FileStore(folder / "objects"), "ranks", 2), trainer)
    return trainer.full()


async def write_alone(folder: Path) -> dict[str, list]:
    trainer = Trainer(0, seed=3, sharded=False)
    trainer.step(1)
    checkpoints = Checkpoints(FileStore(folder / "one"), "ranks", 2)
    await checkpoints.open()
    await saved(checkpoints, trainer, 1)
    return trainer.full()


def in_process(context, results, function, *arguments) -> multiprocessing.Process:
    """Run an async function in a fork, before which this process has started no thread."""
    def run() -> None:
        torch.set_num_threads(1)
        results.put((arguments[0], asyncio.run(function(*arguments))))
    process = context.Process(target=run)
    process.start()
    return process


def main(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    found: dict[str, object] = {}
    for stage in ([(write_alone, folder)], [(rank_main, rank, folder) for rank in range(RANKS)], [(alone, folder)]):
        results = context.SimpleQueue()
        processes = [in_process(context, results, *call) for call in stage]
        for process in processes:
            process.join()
            if process.exitcode:
                sys.exit(f"{stage[0][0].__name__}: exit code {process.exitcode}")
        for _ in processes:
            first, result = results.get()
            found[str(first) if isinstance(first, int) else stage[0][0].__name__] = result
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
