"""`slipstream certs` and `slipstream token`: what a run on this machine, or a program outside, proves itself with."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Sequence
from pathlib import Path

from slipstream.auth import ROLES
from slipstream.auth_tokens import Claims, read_secrets, sign
from slipstream.errors import ConfigError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def certs(folder: Path, roles: Sequence[str], run: str, lifetime: str) -> int:
    """An authority, kept over calls, and a fresh certificate per role. Processes that run take the new ones by themselves."""
    from slipstream import tls_authority

    if unknown := next((r for r in roles if r not in ROLES), None):
        raise ConfigError(f"--role {unknown!r} is not a role; known: {', '.join(ROLES)}")
    authority = tls_authority.open_authority(folder / "authority")
    for role in roles or ROLES:
        tls_authority.issue(authority, folder / role, role, run, datetime.timedelta(seconds=duration_s(lifetime, "--lifetime")))
    print(f"certificates of {', '.join(roles or ROLES)} in {folder}, good for {lifetime}; use them with")
    print(f"  slipstream run RUN.toml --set security.tls_dir={folder.resolve()}")
    print(f"keep {folder / 'authority' / 'ca.key'} to yourself: whoever has it can be anybody")
    return 0


def token(secret_file: Path, role: str, name: str, ttl: str, calls_per_minute: int, bytes_per_minute: int) -> int:
    """Print a signed token, alone on stdout."""
    secrets = read_secrets(secret_file)
    if not secrets:
        raise ConfigError(f"{secret_file} does not exist: name the run's secret with --secret-file, or start the run once")
    expires = int(time.time() + duration_s(ttl, "--ttl"))
    print(sign(Claims(name, role, expires, calls_per_minute, bytes_per_minute), secrets[0]))
    return 0


def duration_s(text: str, option: str) -> int:
    """Seconds of "90s", "15m", "1h" or "30d". Raises ConfigError."""
    match = re.fullmatch(r"([1-9]\d{0,8})([smhd])", text)
    if match is None:
        raise ConfigError(f"{option} {text!r} is not a duration: write 90s, 15m, 1h or 30d")
    return int(match[1]) * _UNITS[match[2]]
