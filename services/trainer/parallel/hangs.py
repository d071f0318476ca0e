"""A rank that hangs: how long the others wait for it, and how its stacks come into the log.

    a rank waits in a collective ──collective_timeout_s──► RuntimeError: it writes its own stacks, and sends SIGUSR1 to the
    other ranks of its machine ──► each writes the stacks of its threads, whatever it is doing ──► torchrun ends them all

So the log has the stacks of the rank that hangs, too, unless it is stopped (SIGSTOP) or its machine is away. Every machine with
a rank that waits asks its own.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from slipstream import logs

STACKS = signal.SIGUSR1  # slipstream.service has it do the same in every service
SAME = ("RANK", "TORCHELASTIC_RUN_ID")  # tells a rank of ours from a process of the same number elsewhere

log = logs.get("trainer.parallel")


def listen() -> None:
    """In every rank, before anything can hang: stacks on a crash and when asked for."""
    faulthandler.enable()
    faulthandler.register(STACKS, all_threads=True)


def known(rank: int) -> None:
    """Tell the other ranks which process this is. After `mesh.join`."""
    c10d._get_default_store().set(f"process/{rank}", str(os.getpid()))


def bounded(groups: Iterable[dist.ProcessGroup], seconds: float) -> None:
    """No collective of these groups takes longer.

    The meshes of transformers, and other groups made without a time-out, take torch's default: ten minutes on NCCL, thirty on
    gloo. torch has no public name for changing it (torch 2.13: distributed_c10d._set_pg_timeout).
    """
    for group in groups:
        c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def ask() -> list[int]:
    """Have the other ranks of this machine write their stacks, each once, whoever asks first. Returns those asked."""
    asked = []
    try:
        store: Any = c10d._get_default_store()
        for rank in range(int(os.environ.get("WORLD_SIZE", "1"))):
            if rank == int(os.environ.get("RANK", "0")) or not store.check([f"process/{rank}"]):
                continue
            process = int(store.get(f"process/{rank}"))
            if _is(process, rank) and store.add(f"stacks/{rank}/{process}", 1) == 1:
                log.error(f"rank {rank}, process {process}, is asked for its stacks")
                os.kill(process, STACKS)
                asked.append(rank)
    except (RuntimeError, ValueError, OSError) as error:  # no group, no store, or no process any more
        log.warning(f"the other ranks could not be asked for their stacks: {error}")
    return asked


def _is(process: int, rank: int) -> bool:
    """Whether the process is that rank of this run, on this machine."""
    try:
        environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return all(f"{name}={value}".encode() in environment for name, value in (
        (SAME[0], str(rank)), (SAME[1], os.environ.get(SAME[1], ""))))
