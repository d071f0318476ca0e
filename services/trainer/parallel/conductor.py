"""Rank 0 leads, the others follow: the trainer's loop runs on rank 0 alone, and every call of its learner on all ranks.

    rank 0: TrainerLoop ──► Lead.step(...) ──"step"──► followers: ShardedLearner.step(...)        together, with collectives
                            what concerns checkpoints ──► followers: checkpoints.Follower
                            an "idle" every few seconds, so that followers wait with a deadline even when no batch comes

Consumes     (followers) the names of calls, broadcast by rank 0.
Produces     the same calls on their own shards.
Waits for    rank 0's next call, or its sign of life, for trainer.parallel.collective_timeout_s.
Unblocked by rank 0; its death closes the connection or lets the deadline pass, and the follower ends with 1.

A step that takes longer than trainer.parallel.step_timeout_s is hung: the stacks of all threads go to stderr and the process
ends, for a restart from the checkpoint in force. So they do when a collective fails.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import distributed as dist

from services.trainer.learner import Metrics
from services.trainer.packing import Group, Row
from services.trainer.parallel import hangs
from services.trainer.parallel.checkpoints import Follower
from services.trainer.parallel.learner import ShardedLearner
from services.trainer.snapshot import Allocate, Snapshot
from slipstream import config, logs
from slipstream.manifest import RawTensor
from slipstream.probes import Probes

IDLE, CLOSE = "idle", "close"
LAST_S = 15.0  # after a collective has failed a process has this long to stop in order

log = logs.get("trainer.parallel")


class Lead:
    """Rank 0's learner, with the interface of `Learner`: each call runs on all ranks. One thread may call at a time."""

    def __init__(self, run: config.RunFile) -> None:
        hangs.listen()
        with _dumped():
            self._own = ShardedLearner(run)
        self._limit_s, self._every_s = run.trainer.parallel.step_timeout_s, run.trainer.parallel.collective_timeout_s / 4
        self.run, self.tokenizer, self.adapter = run, self._own.tokenizer, self._own.adapter
        self.model = _Model(self)
        self._turn, self._closed, self._last = threading.Lock(), threading.Event(), time.monotonic()
        threading.Thread(target=self._beat, name="signs of life", daemon=True).start()

    @property
    def skip(self) -> Any:
        """See Learner."""
        return self._own.skip

    def prepared(self, groups: Sequence[Group], step: int) -> list[Row] | None:
        """See Learner: nobody else is asked."""
        return self._own.prepared(groups, step)

    def step(self, groups: Sequence[Group], step: int, prepared: list[Row] | None = None) -> Metrics:
        return self._all("step", groups, step, prepared, shown=((), step))

    def supervised_step(self, rows: Sequence[Row], learning_rate: float, what: str) -> float:
        return self._all("supervised_step", rows, learning_rate, what, shown=((), learning_rate, what))

    def start_rl(self, keep_optimizer: bool) -> None:
        self._all("start_rl", keep_optimizer)

    def start_reference(self, first: Sequence[RawTensor] | None = None) -> None:
        self._all("start_reference", first, shown=(None,))

    def weights(self) -> list[RawTensor]:
        return self._all("weights")

    def probes(self) -> Probes:
        return self._all("probes")

    def base(self) -> Sequence[RawTensor]:
        return self._own.base()

    def snapshot(self) -> Snapshot:
        return self._all("snapshot")

    def load(self, snapshot: Snapshot) -> None:
        self._all("load", snapshot, shown=(None,))

    def leave_device(self) -> None:
        self._all("leave_device")

    def enter_device(self) -> None:
        self._all("enter_device")

    def files(self) -> dict[str, bytes]:
        return self._own.files()

    def save_pretrained(self, folder: Path) -> None:
        self._all("save_pretrained", folder)

    @property
    def background(self) -> dist.ProcessGroup:
        """All ranks, beside the steps."""
        return self._own.background

    def begin(self, name: str, *arguments: Any) -> None:
        """See checkpoints.Leading."""
        self._turn.acquire()
        _tell((name, arguments))

    def end(self) -> None:
        """See checkpoints.Leading."""
        self._last = time.monotonic()
        self._turn.release()

    def allocate(self) -> Allocate:
        """Where rank 0's shards of a checkpoint go."""
        return self._own.allocate()

    def close(self) -> None:
        """Let the followers go. Nothing may be called afterwards."""
        if self._closed.is_set():
            return
        self._closed.set()
        with self._turn, _dumped():
            _tell((CLOSE, ()))
            self._own.close()
            dist.destroy_process_group()

    def _all(self, name: str, *arguments: Any, shown: tuple[Any, ...] | None = None) -> Any:
        """Call a method everywhere; followers get `shown` instead of the arguments that only rank 0 needs."""
        with self._turn, limited(self._limit_s), _dumped():
            _tell((name, arguments if shown is None else shown))
            try:
                return getattr(self._own, name)(*arguments)
            finally:
                self._last = time.monotonic()

    def _beat(self) -> None:
        while not self._closed.wait(self._every_s):
            if not self._turn.acquire(blocking=False):
                continue
            try:
                if not self._closed.is_set() and time.monotonic() - self._last > self._every_s / 2:
                    _tell((IDLE, ()))
            except RuntimeError as error:
                log.warning(f"a follower is gone: {error}")
                return  # the next call fails, too, and ends the process
            finally:
                self._turn.release()


class _Model:
    """What the loop does with a learner's model: look at its configuration and its forward passes, and try one."""

    device = "cpu"

    def __init__(self, lead: Lead) -> None:
        self._lead = lead

    @property
    def config(self) -> Any:
        return self._lead._own.model.config

    def register_forward_hook(self, hook: Callable[..., None]) -> Any:
        return self._lead._own.model.register_forward_hook(hook)

    def __call__(self, **_: Any) -> None:
        self._lead._all("probe")


def follow(run: config.RunFile) -> int:
    """A rank other than 0, from start to end. Returns its exit code."""
    hangs.listen()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 stops in order, and needs us for its last checkpoint
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _dumped():
        learner = ShardedLearner(run)
        checkpoints = Follower(run, learner, learner.background)
        while True:
            heard: list[Any] = [None]
            dist.broadcast_object_list(heard, src=0)
            name, arguments = heard[0]
            if name == CLOSE:
                learner.close()
                if checkpoints.close():
                    dist.destroy_process_group()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nobody needs us any more
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                return 0
            if name != IDLE:
                with limited(run.trainer.parallel.step_timeout_s):
                    getattr(checkpoints if hasattr(checkpoints, name) else learner, name)(*arguments)


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Longer than this is a hang: stacks to stderr, and the end of the process."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _dumped() -> Iterator[None]:
    """A collective that fails (a dead rank, a time-out) leaves the stacks of all threads behind, those of other ranks, too."""
    try:
        yield
    except RuntimeError:
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        hangs.ask()
        last = threading.Timer(LAST_S, os._exit, (1,))  # a checkpoint's thread may wait for the lost rank much longer
        last.daemon = True
        last.start()
        raise


def _tell(call: tuple[str, tuple[Any, ...]]) -> None:
    dist.broadcast_object_list([call], src=0)
