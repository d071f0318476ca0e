"""`slipstream sft RUN.toml`: the command side of supervised fine-tuning. The work is done by a tool of the trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from slipstream.cli import preflight, run_folder, run_start
from slipstream.config import RunFile
from slipstream.service_command import launch_environment


def sft(run_file: RunFile, fresh: bool) -> int:
    """Run it to its end; the exit code. Raises ConfigError for what can be known before torch is loaded."""
    preflight.supervised(run_file)
    preflight.model(run_file)
    preflight.packages(run_file)
    folder, lock = run_folder.lock(run_file)
    try:
        run_start.lay_out(folder, run_file, fresh)
        run_folder.write_run_file(folder, run_file, "")
        return _wait(subprocess.Popen(
            [sys.executable, "-m", "services.trainer.sft", "--folder", str(folder.path)],
            env={**os.environ, **launch_environment(run_file.trainer.threads)}, pass_fds=(lock.fd,)))
    finally:
        lock.release()


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Its exit code. Ctrl-C reaches it, too, and it stops by itself after the step."""
    former = signal.signal(signal.SIGINT, lambda *_: None), signal.signal(signal.SIGTERM, lambda n, _: process.send_signal(n))
    try:
        return process.wait()
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), former, strict=True):
            signal.signal(number, handler)
