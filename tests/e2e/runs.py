"""Whole runs from tests: a run file, the real command, what it left behind."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from slipstream.config import RunFile, parse
from slipstream.manifest import read_manifest, read_tensors
from slipstream.model import cooked
from slipstream.objects import open_store
from slipstream.protos.types.v1 import policy_pb2
from slipstream.sample import crc32c

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'e2e'}", "OMP_NUM_THREADS": "1"}


def write_run_file(folder: Path, model_dir: Path, sections: dict[str, dict[str, Any]]) -> Path:
    """A small run on sort-digits with a scorer that a random model satisfies in part; `sections` override."""
    data: dict[str, Any] = {
        "run": {"name": "test", "folder": str(folder / "run"), "steps": 4},
        "model": {"path": str(model_dir)},
        "environments": [
            {
                "name": "sort-digits",
                "entry": "slipstream.environments.sort_digits:SortDigits",
                "scorer": "plain_loop:even_share",
            }
        ],
        "schedule": {"groups_per_batch": 4, "group_size": 4, "max_lag": 1},
        "trainer": {"learning_rate": 1e-3, "checkpoint_every": 2},
        "rollout": {"slots": 64, "context": 32, "max_new_tokens": 6},
        "buffer": {"durability": "memory"},
        "objects": {"keep_versions": 1000},
    }
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values}
    path = folder / "run.json"
    path.write_text(json.dumps(data))
    return path


def start(*arguments: str) -> subprocess.Popen[str]:
    """`slipstream ...` as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli", *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 100) -> str:
    """Its output; fails the test when the exit code is not 0."""
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, output
    return output


def run(path: Path, *arguments: str) -> str:
    """`slipstream run` to its end."""
    return finish(start("run", str(path), "--plain", *arguments))


def metrics(run_file: RunFile) -> list[dict[str, Any]]:
    """One line a step."""
    return [json.loads(line) for line in (run_file.folder / "metrics.jsonl").read_text().splitlines()]


def published(run_file: RunFile) -> dict[int, dict[str, Any]]:
    """Step → the weights of its newest version, read back and verified as a worker does."""

    async def read() -> dict[int, dict[str, Any]]:
        found = {}
        async with open_store(run_file.objects_url) as store:
            for key in await store.list("versions/"):
                if not key.endswith("/manifest.json"):
                    continue
                text = await store.get(key)
                head = json.loads(text)
                version = policy_pb2.PolicyVersion(
                    number=head["number"],
                    step=head["step"],
                    incarnation=head["incarnation"],
                    manifest_key=key,
                    manifest_crc32c=crc32c(text),
                )
                tensors = await read_tensors(store, await read_manifest(store, version, run_file.run.name))
                found[version.step] = {t.name: cooked(t).clone() for t in tensors}
        return found

    return asyncio.run(read())


def load(path: Path) -> RunFile:
    """The run file as the services see it."""
    return parse(json.loads(path.read_text()))
