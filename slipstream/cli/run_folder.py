"""The run folder on disk: names, the lock, the resolved run file, the secret, the supervisor's public state.

    <folder>/run.json          the resolved run file that every process reads
    <folder>/secret            0600, key of the role tokens
    <folder>/lock              flock held by the supervisor and inherited by every process of the run: free = all are gone
    <folder>/supervisor.json   who supervises, what it started, what happened (read by `status` and `watch`)
    <folder>/services/*.json   where each process serves
    <folder>/logs/*.log        one file per process, JSON lines
    <folder>/metrics.jsonl     one line per optimizer step
    <folder>/audit/*.jsonl     what was trained, for the audit at the end, and what was published, for replay
    <folder>/fork.json         where a forked run came from
    <folder>/redis/            data of the embedded Redis
    <folder>/objects/          versions, checkpoints and batch log, unless objects.url says otherwise
    <folder>/model/            the trained Hugging Face model
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream import config
from slipstream.errors import ConfigError, NotFound


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run folder."""

    path: Path

    @property
    def run_file(self) -> Path:
        return self.path / "run.json"

    @property
    def secret(self) -> Path:
        return self.path / "secret"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def state(self) -> Path:
        return self.path / "supervisor.json"

    @property
    def services(self) -> Path:
        return self.path / "services"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trained(self) -> Path:
        return self.path / "audit" / "trainer.jsonl"

    @property
    def published(self) -> Path:
        return self.path / "audit" / "versions.jsonl"

    @property
    def fork(self) -> Path:
        return self.path / "fork.json"

    @property
    def redis(self) -> Path:
        return self.path / "redis"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def log(self, instance: str) -> Path:
        return self.logs / f"{instance}.log"


class RunLock:
    """The lock of a run folder. `fd` is passed to every process of the run, so the lock outlives a killed supervisor
    until the last of them is gone: a second run can never share the folder with leftovers of the first."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def take(cls, folder: RunFolder, leftover_wait_s: float = 30.0) -> RunLock:
        """Raises ConfigError when a live run holds it, or when leftovers of a dead one stay longer than the wait."""
        fd = os.open(folder.lock, os.O_RDWR | os.O_CREAT, 0o600)
        deadline, told = time.monotonic() + leftover_wait_s, False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pid = int(os.pread(fd, 32, 0).split()[0] or b"0") if os.fstat(fd).st_size else 0
                if alive(pid):
                    os.close(fd)
                    raise ConfigError(
                        f"{folder.path} is locked by a live run (pid {pid}): follow it with `slipstream watch {folder.path}`, "
                        f"stop it with `kill -INT {pid}`, or set another run.name") from None
                if time.monotonic() > deadline:
                    os.close(fd)
                    raise ConfigError(
                        f"{folder.path} is locked by processes of a run whose supervisor (pid {pid}) is gone: stop them with "
                        f"`kill {' '.join(map(str, leftovers(folder)))}`, then start again") from None
                if not told:
                    told = True
                    print(f"waiting for processes of a run whose supervisor (pid {pid}) is gone", file=sys.stderr, flush=True)
                time.sleep(0.1)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return cls(fd)

    def release(self) -> None:
        """Close our descriptor; the lock is free once no child holds it either."""
        os.close(self.fd)


def held(folder: RunFolder) -> bool:
    """True while a supervisor or a process of the run is alive."""
    try:
        fd = os.open(folder.lock, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def alive(pid: int) -> bool:
    """True when a process of that id exists."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def leftovers(folder: RunFolder) -> list[int]:
    """Process ids that the last supervisor of the folder started and that are still there."""
    state = read_json(folder.state) or {}
    return [c["pid"] for c in state.get("processes", {}).values() if alive(c.get("pid") or 0)]


def lock(run: config.RunFile) -> tuple[RunFolder, RunLock]:
    """Create or reopen the folder of a run and lock it. Raises ConfigError when it is not ours or cannot be written."""
    folder = RunFolder(run.folder)
    with writing(folder):
        check_ours(folder)
        folder.path.mkdir(parents=True, exist_ok=True)
        return folder, RunLock.take(folder)


def check_ours(folder: RunFolder) -> None:
    """Raises ConfigError when the folder holds files that are not of a run."""
    if folder.path.exists() and any(folder.path.iterdir()) and not any(
            (folder.run_file.exists(), folder.lock.exists(), folder.fork.exists())):
        raise ConfigError(f"run.folder = {folder.path} has files that are not of a run: choose an empty or a new folder")


@contextlib.contextmanager
def writing(folder: RunFolder) -> Iterator[None]:
    """A folder that cannot be written is a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"run folder {folder.path} cannot be written ({error.strerror or error}): set run.folder to another one") from None


def write_run_file(folder: RunFolder, run: config.RunFile, buffer_address: str) -> config.RunFile:
    """Write the resolved run file that every process reads, and return it."""
    data = run.model_dump(mode="json")
    data["run"]["folder"] = str(folder.path)
    data["service"]["buffer_address"] = buffer_address
    for name in ("tls_dir", "secret_file"):
        if data["security"][name]:
            data["security"][name] = str(Path(data["security"][name]).resolve())
    resolved = config.parse(data, "resolved run file")
    write_json(folder.run_file, data)
    return resolved


def find(run: str) -> tuple[RunFolder, config.RunFile]:
    """The run behind a folder, a run file or a name under runs/. Raises NotFound with the places looked at."""
    path = Path(run)
    if path.suffix == ".toml" and path.is_file():
        folder = RunFolder(config.load(path).folder)
        if not folder.run_file.exists():
            raise NotFound(f"{run} has not been started: {folder.run_file} does not exist; `slipstream run {run}` starts it")
        return folder, config.load(folder.run_file)
    for candidate in (path, Path("runs") / run):
        if (candidate / "run.json").is_file():
            folder = RunFolder(candidate.resolve())
            return folder, config.load(folder.run_file)
        if (candidate / "fork.json").is_file():
            raise NotFound(f"{run} is a fork that has not been started: `slipstream run {candidate / 'run.toml'}` starts it")
    known = sorted(p.parent.name for p in Path("runs").glob("*/run.json"))
    raise NotFound(f"no run {run!r}: neither {path} nor runs/{run} is a run folder; "
                   + (f"runs here: {', '.join(known[:8])}" if known else "start one with `slipstream run RUN.toml`"))


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file that others replace atomically; None when it is not there."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Replace a JSON file atomically."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(data, file, indent=1)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise
