"""A rank that hangs: the others give up in time, whatever group they wait in, and its stacks come into the log."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.utils import initialize_distributed_mesh

from services.trainer.parallel import mesh
from tests.parallel import ranks

ROOT = Path(__file__).parents[2]
RANK = """
import os, sys, time
from datetime import timedelta
from torch.distributed import FileStore
from services.trainer.parallel import hangs
rank, store = int(os.environ["RANK"]), FileStore(sys.argv[1], 2)
hangs.listen()
hangs.c10d._get_default_store = lambda: store
hangs.known(rank)
def somewhere_deep():
    store.set("there", "")
    store.wait(["over"], timedelta(seconds=60))
if rank:
    somewhere_deep()
else:
    store.wait(["there", "process/1"], timedelta(seconds=60))
    print(hangs.ask(), hangs.ask(), flush=True)
"""


@pytest.mark.slow
def test_a_hanging_rank_writes_its_stacks_when_another_waits_in_vain(tmp_path: Path) -> None:
    """Once, however often it is asked; the process goes on hanging, and is ended by whoever started it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "store")], env=environment | {"RANK": str(rank)}, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)]
    try:
        out, err = started[0].communicate(timeout=60)
        assert out.strip() == "[1] []", err
        assert started[1].poll() is None, "it was killed instead of asked"
    finally:
        started[1].kill()
    _, stacks = started[1].communicate(timeout=60)
    assert stacks.count("somewhere_deep") == 1 and "most recent call first" in stacks


def late(seconds: float) -> float:
    """On a rank of four: how long two of them wait for the others in the meshes of experts on half of the ranks."""
    _, meshes = initialize_distributed_mesh(DistributedConfig(fsdp_size=4, ep_size=2, ep_implementation="auto"))
    mesh.bounded(meshes, seconds)
    started, store = time.monotonic(), _get_default_store()
    if dist.get_rank() % 2 == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
            dist.all_reduce(torch.zeros(1), group=meshes.get_mesh("ep").get_group())  # pyright: ignore
        store.set(f"gave up {dist.get_rank()}", "")
    store.wait(["gave up 0", "gave up 2"], timedelta(seconds=30))
    return time.monotonic() - started


@pytest.mark.slow
@pytest.mark.nightly
def test_no_group_waits_longer_than_a_collective_may() -> None:
    """Those of transformers' meshes would wait for half an hour."""
    waited = ranks.run(4, late, 1.0)
    assert 1 <= max(waited) < 25, waited
