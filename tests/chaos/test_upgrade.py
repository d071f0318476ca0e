"""The upgrade edition of chaos: services start from the files of another release, and one after the other from these."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.faults import releases
from benchmarks.faults.divert import Site
from benchmarks.faults.releases import ORDERS, RECORD, NoRelease, Upgrade, former, unpack
from benchmarks.faults.victims import Ended, Run

ROOT = Path(__file__).resolve().parents[2]


def git(folder: Path, *words: str) -> str:
    names = ("-c", "user.name=t", "-c", "user.email=t")
    return subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, name: str) -> str:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(name)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", name)
    return git(folder, "rev-parse", "HEAD")


def test_the_last_release_is_found_with_and_without_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest tag; in a clone without tags the commit that recorded the release; else a sentence with the remedy."""
    monkeypatch.setattr(releases, "ROOT", tmp_path)
    with pytest.raises(NoRelease, match="the last release is not in this clone.*--unshallow --tags"):
        former()
    git(tmp_path, "init", "-q")
    commit(tmp_path, "a")
    with pytest.raises(NoRelease):
        former()
    recorded = commit(tmp_path, RECORD)
    later = commit(tmp_path, "b")
    assert former() == recorded and former("HEAD") == later and former(later[:9]) == later
    git(tmp_path, "tag", "v1.0.0")
    commit(tmp_path, "c")
    assert former() == later
    with pytest.raises(NoRelease, match="v9 is not in this clone"):
        former("v9")
    git(tmp_path, "tag", "-d", "v1.0.0")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{tmp_path}", "shallow")  # all files seem to be of its one commit
    monkeypatch.setattr(releases, "ROOT", tmp_path / "shallow")
    with pytest.raises(NoRelease, match="--unshallow"):
        former()


def test_a_service_starts_from_the_other_releases_files(tmp_path: Path) -> None:
    """Its own modules, its own folder, and the run file as the user wrote it: the resolved one has settings it may not know."""
    site = Site(tmp_path / "site")
    site.write_plan({}, "")
    tree = tmp_path / "tree"
    module = tree / "services" / "reward" / "__main__.py"
    module.parent.mkdir(parents=True)
    module.write_text("import json, os, sys\nprint(json.dumps([os.getcwd(), os.environ['PYTHONPATH'], sys.argv[1:]]))")
    site.change_plan(releases={"reward": str(tree)})
    words = ["--run-file", str(site.run / "run.json"), "--instance", "reward-0", "--buffer", "127.0.0.1:1"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults.services.reward", *words], cwd=ROOT, capture_output=True, text=True,
        check=True)
    assert json.loads(done.stdout) == [str(tree), str(tree), ["--run-file", str(site.run_file), *words[2:]]]
    life = json.loads(site.lives.read_text())
    assert (life["service"], life["instance"], life["tree"]) == ("reward", "reward-0", str(tree))


class Fleet:
    """Stands in for a run: a process for each service, and a trainer's record that grows with every look."""

    def __init__(self, site: Site) -> None:
        self.site, self.looks, self.told = site, 0, []
        self.code: int | None = None
        self.processes = {service: self.live(service) for service in ORDERS["buffer-first"]}
        self.folder = self

    def live(self, service: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sleep", "60"])
        threading.Thread(target=process.wait, daemon=True).start()  # a supervisor hears of a death at once
        return process

    def pids(self, service: str) -> list[int]:
        self.told.append((service, sorted(json.loads(self.site.plan.read_text())["releases"])))
        return [self.processes[service].pid]

    @property
    def trained(self) -> Path:
        self.looks += 1
        path = self.site.folder / "trainer.jsonl"
        path.write_text("{}\n" * self.looks)
        return path


async def test_one_service_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan changes before the signal, so whoever is started again is new; each mixture trains before the next begins."""
    site = Site(tmp_path)
    site.write_plan({}, "")
    monkeypatch.setattr(releases, "unpack", lambda commit, folder: folder)
    monkeypatch.setattr(releases, "LOOK_S", 0.01)
    fleet = Fleet(site)
    upgrade = Upgrade(site, cast(Run, cast(Any, fleet)), "a" * 40, ORDERS["trainer-first"], 0.0, lambda text: None)
    upgrade.begin()
    await asyncio.wait_for(upgrade.roll(), 30)
    assert fleet.told == [
        ("trainer", ["buffer", "reward", "rollout"]), ("rollout", ["buffer", "reward"]), ("reward", ["buffer"]), ("buffer", [])]
    assert all(process.wait(5) == -15 for process in fleet.processes.values())
    assert [row[:4] for row in upgrade.table()][2] == ["former", "former", "new", "new"]
    assert all(m.steps >= releases.TRAINED for m in upgrade.mixtures)
    assert upgrade.complaints() == [
        f"{service} was never started from the {where} release" for service in ORDERS["trainer-first"]
        for where in ("former", "new")]
    for service in ORDERS["trainer-first"]:
        site.note_life(service, f"{service}-0", str(tmp_path))
        site.note_life(service, f"{service}-0", "")
    assert not upgrade.complaints()
    upgrade.mixtures[1].steps = 4
    assert upgrade.complaints()[0].startswith("with rollout, reward, buffer of the former release only 4 steps were trained")
    del upgrade.mixtures[3:]
    assert upgrade.complaints()[-1] == "the run was over after 3 of 5 mixtures"


async def test_a_run_that_is_over_ends_the_upgrade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path)
    site.write_plan({}, "")
    monkeypatch.setattr(releases, "unpack", lambda commit, folder: folder)
    fleet = Fleet(site)
    fleet.code = 1
    for process in fleet.processes.values():
        process.kill()
        process.wait()
    with pytest.raises(Ended):
        await Upgrade(site, cast(Run, cast(Any, fleet)), "a" * 40, ORDERS["buffer-first"], 5.0, print).roll()


def test_a_release_is_unpacked_whole(tmp_path: Path) -> None:
    tree = unpack(former("HEAD"), tmp_path / "tree")
    for part in ("services/buffer/scripts/ledger.lua", "slipstream/protos/buffer/v1/samples_pb2.py", "benchmarks/chaos.py"):
        assert (tree / part).is_file(), part


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_run_is_upgraded_service_by_service(tmp_path: Path) -> None:
    """From this very commit, so that a clone without history can: every mixture trains, lost 0, repeated 0."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", "--previous", "HEAD", "--minutes", "1", "--schedule", "free",
         "--steps", "150", "--folder", str(tmp_path / "chaos")], cwd=ROOT, capture_output=True, text=True, timeout=400,
        check=False)
    assert " lost 0, repeated 0, " in done.stdout, done.stdout[-2000:] + done.stderr
    found = [line for line in done.stderr.splitlines() if line.startswith("chaos: ")]
    assert all(line.startswith("chaos: only ") for line in found), done.stderr  # a slow machine: less was disturbed
