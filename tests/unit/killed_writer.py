"""A writer of checkpoints that is killed again and again: started by test_checkpoint_processes.py as
`python killed_writer.py FOLDER ROUNDS SEED`. Prints one JSON line a round: [acknowledged step, step found, its weights' value].
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import sys
import time
from pathlib import Path

import torch

from services.trainer.checkpoint import Checkpoints
from services.trainer.snapshot import Snapshot
from slipstream.objects import FileStore


async def write(folder: Path, acknowledge) -> None:
    """Checkpoints of ever higher steps, until killed. The weights hold the step."""
    checkpoints = Checkpoints(FileStore(folder), "killed", 1)
    pointer = await checkpoints.open()
    await checkpoints.take_over(incarnation := pointer.incarnation + 1)
    for step in range(pointer.step + 1, 10**6):
        value = torch.full((250_000,), float(step))
        snapshot = Snapshot({"w": value}, {"w/exp_avg": value}, {"0/torch": torch.zeros(4, dtype=torch.uint8)})
        await checkpoints.save(snapshot, step=step, incarnation=incarnation, ledger_sequence=step)
        acknowledge(step)
        await checkpoints.retain()


async def read(folder: Path) -> tuple[int, float]:
    """(step, value) of the checkpoint that a new start would take."""
    checkpoints = Checkpoints(FileStore(folder), "killed", 1)
    await checkpoints.open()
    loaded = await checkpoints.load()
    assert loaded is not None
    value = loaded[1].weights["w"]
    assert torch.equal(value, loaded[1].optimizer["w/exp_avg"]) and bool((value == value[0]).all())
    return loaded[0].step, float(value[0])


def main(folder: Path, rounds: int, seed: int) -> None:
    context, chance = multiprocessing.get_context("fork"), random.Random(seed)
    for _ in range(rounds):
        ours, theirs = context.Pipe(duplex=False)
        writer = context.Process(target=lambda: asyncio.run(write(folder, theirs.send)))  # noqa: B023
        writer.start()
        acknowledged = ours.recv()  # the first; then it dies at any instant of one of the next
        time.sleep(chance.random() * 0.1)
        writer.kill()
        writer.join()
        while ours.poll():
            acknowledged = ours.recv()
        reader = context.Process(target=lambda: theirs.send(asyncio.run(read(folder))))  # noqa: B023
        reader.start()
        reader.join()
        if reader.exitcode:
            sys.exit(f"after a kill behind step {acknowledged} nothing could be loaded")
        print(json.dumps([acknowledged, *ours.recv()]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
