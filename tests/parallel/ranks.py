"""Ranks for tests: processes of one gloo group, forked from a server that has torch imported, so that a world costs 0.3 s.

A test module runs all that it needs in a few worlds and looks at what they return: processes are the expensive part.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "transformers", "tests.parallel.preload"])


class RankError(AssertionError):
    """A rank failed; the message holds its traceback."""


def run(
    ranks: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = TIMEOUT_S, backend: str = "gloo",
    **environment: str,
) -> list[Any]:
    """`function(*arguments)` on every rank of a world. Returns what each returned; raises RankError for the first failure.

    `function` is found by its module's name, so it is defined at the top of a module that tests may import.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            here, there = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank, args=(rank, ranks, folder, there, timeout_s, backend, environment, function, arguments),
                daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            return _collect(pipes, timeout_s)
        except RankError:
            for process in processes:
                process.kill()
            raise
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], timeout_s: float) -> list[Any]:
    found: dict[int, Any] = {}
    left = {pipe: rank for rank, pipe in enumerate(pipes)}
    while left:
        ready = wait(list(left), timeout_s)
        if not ready:
            raise RankError(f"ranks {sorted(left.values())} said nothing for {timeout_s:g} s")
        for pipe in ready:
            rank = left.pop(pipe)  # pyright: ignore
            try:
                ok, value = pipe.recv()  # pyright: ignore
            except EOFError:
                raise RankError(f"rank {rank} died") from None
            if not ok:
                raise RankError(f"rank {rank}: {value}")
            found[rank] = value
    return [found[rank] for rank in range(len(pipes))]


def _rank(
    rank: int, ranks: int, folder: str, pipe: Connection, timeout_s: float, backend: str, environment: dict[str, str],
    function: Callable[..., Any], arguments: tuple[Any, ...],
) -> None:
    os.environ.update(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)})
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder) / "store"), ranks)
        device = None
        if backend == "nccl":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s / 2), device_id=device)
        value = function(*arguments)
        pipe.send((True, value))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.close()
