"""`slipstream doctor` for a trainer on several ranks: what its network needs and this machine lacks.

The list is `python -m services.trainer.parallel.fabric --check`'s, which looks at the environment, the EFA adapters and
drivers, GDRCopy and NCCL. The trainer sets the preset of its instance type itself, so variables that nobody has set are not
missing.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

from slipstream.cli.doctor_finding import FAIL, OK, WARN, Finding
from slipstream.config import RunFile

NAME = "trainer.parallel"


async def ranks(run: RunFile, roles: Sequence[str]) -> list[Finding]:
    """Nothing for one rank, or when the trainer is not among the roles. What a trainer's machine lacks for DeepEP fails."""
    settings = run.trainer.parallel
    if settings.ranks == 1 or (roles and "trainer" not in roles):
        return []
    found = []
    if settings.collective_timeout_s >= run.rollout.lease_s:
        found.append(Finding(
            NAME, WARN, f"collective_timeout_s = {settings.collective_timeout_s:g} is not below rollout.lease_s = "
            f"{run.rollout.lease_s:g}: a dead rank is noticed after a dead rollout worker; lower it"))
    wanted = settings.exchange == "deep_ep"
    if settings.instance_type and settings.exchange in ("auto", "deep_ep"):
        kind = ["--instance-type", settings.instance_type, *(["--transport", settings.transport] if settings.transport else [])]
        lacks = await _lacks(kind)
        state = FAIL if wanted and "trainer" in roles else WARN
        found += [Finding(NAME, state, f"DeepEP on {settings.instance_type}: {text}") for text in lacks]
    elif wanted:
        found.append(Finding(
            NAME, WARN, "exchange = deep_ep without instance_type: nobody looks at EFA; set it, such as p5en.48xlarge"))
    return found or [Finding(NAME, OK, f"{settings.ranks} ranks, exchange {settings.exchange}")]


async def _lacks(kind: Sequence[str]) -> list[str]:
    """What this machine lacks, each with its remedy."""
    code, out, err = await _fabric(kind, {})
    if code:
        return [" ".join(err.split())]
    preset = dict(line.split("=", 1) for line in out.splitlines())
    code, out, err = await _fabric([*kind, "--check"], preset)
    return out.splitlines() if code == 1 else [" ".join(err.split())] if code else []


async def _fabric(arguments: Sequence[str], preset: Mapping[str, str]) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.trainer.parallel.fabric", *arguments, env={**preset, **os.environ},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()
