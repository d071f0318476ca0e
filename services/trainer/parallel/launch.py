"""How the trainer becomes several processes: `python -m services.trainer` starts torchrun, and torchrun starts it again.

    python -m services.trainer (trainer.parallel.ranks = 4)
      └─ torchrun's agent ──► rank 0: the service, with the loop     ranks 1..3: conductor.follow

Under torchrun already (RANK is set: several machines, Kubernetes) nothing more is started. A rank that dies ends all of them;
whoever started the trainer starts it again, and every start is a resume.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from slipstream import config, logs
from slipstream.errors import ConfigError
from slipstream.objects import ObjectStore
from slipstream.service_command import arguments

if TYPE_CHECKING:
    from services.trainer.checkpoint import Checkpoints

log = logs.get("trainer.parallel")


def divide() -> None:
    """First thing in the trainer's process: become a launcher or a follower and exit, or go on as the service."""
    rank = os.environ.get("RANK")
    try:
        given = arguments("trainer")
    except ConfigError as error:
        if rank in (None, "0"):
            return  # the service says so
        print(error.message, file=sys.stderr)
        sys.exit(2)
    run = given.run
    if run.trainer.parallel.ranks == 1:
        return
    if rank is None:
        sys.exit(launch(run.trainer.parallel.ranks, sys.argv[1:]))
    if int(rank):
        sys.exit(_follow(run, given.stay))


def learner_of(run: config.RunFile) -> Any:
    """The learner of the trainer's loop: in this process alone, or on all ranks."""
    if run.trainer.parallel.ranks == 1:
        from services.trainer.learner import Learner

        return Learner(run)
    from services.trainer.parallel.conductor import Lead

    return Lead(run)


def checkpoints_of(checkpoints: Checkpoints, learner: Any, store: ObjectStore, run: config.RunFile) -> Checkpoints:
    """Those of the trainer's loop: the given ones of one process, or those of all ranks."""
    if run.trainer.parallel.ranks == 1:
        return checkpoints
    from services.trainer.parallel.checkpoints import Led

    return Led(store, run.run.name, run.trainer.keep_checkpoints, learner)


def launch(ranks: int, argv: list[str]) -> int:
    """Run `ranks` processes of the trainer on this machine, to their end. Returns the exit code of the first that failed."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
        monitor_interval=0.5)
    try:
        elastic_launch(settings, sys.executable)("-m", "services.trainer", *argv)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        # A rank that ended by itself has said why; its words are those that people should be shown.
        say = log.error if all(code < 0 for code in codes.values()) else log.warning
        say(f"ranks of the trainer ended: {codes}")
        return max((code for code in codes.values() if code > 0), default=1)
    except SignalException:
        return 0  # asked to stop; rank 0 was, too, and has stopped in order
    return 0


def _follow(run: config.RunFile, stay: bool = False) -> int:
    """A rank that follows, to its end. With `stay` a finished one waits for a signal, as rank 0 does: on a cluster a pod that
    ends is started again, and its whole group with it.
    """
    from services.trainer.parallel.conductor import follow

    try:
        code = follow(run)
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    if stay and not code:
        log.info("the run is finished; staying until told to stop")
        signal.pause()
    return code


def close(learner: Any) -> None:
    """The end of a loop: let the other ranks go."""
    if (end := getattr(learner, "close", None)) is not None:
        end()
