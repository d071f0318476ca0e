"""`slipstream env serve` and `slipstream env check`."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream import environment
from slipstream.auth_credentials import Credentials
from slipstream.cli.preflight import reachable
from slipstream.config import Environment
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.tls import Certificates

CHECK_S = 10.0


def arguments(given: Sequence[str]) -> dict[str, Any]:
    """`key=value` pairs; the value is TOML, or a bare string. Raises ConfigError."""
    found: dict[str, Any] = {}
    for pair in given:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"--arg {pair!r} is not of the form key=value")
        try:
            found[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = text
    return found


def proven(tls_dir: str, role: str, run: str = "") -> Credentials | None:
    """The credentials in a folder; None without one."""
    return Credentials(role, run, certificates=Certificates(Path(tls_dir), role)) if tls_dir else None


def check(address: str, insecure: bool, tls_dir: str = "") -> None:
    """Describe an environment and start one episode; print both. Raises ConfigError or the episode's error."""
    asyncio.run(_check(Environment(name="check", address=address, insecure=insecure), proven(tls_dir, "cli")))


async def _check(settings: Environment, credentials: Credentials | None) -> None:
    await reachable("HOST:PORT", settings.address)
    try:
        async with asyncio.timeout(CHECK_S), environment.connect(settings, credentials=credentials) as client:
            told = client.description
            print(f"address   {settings.address}")
            print(f"tasks     {told.tasks or 'one for every index'}")
            print(f"scorer    {told.scorer or 'none: it gives rewards itself'}")
            [first] = await client.reset([environment.EpisodeReset("check-0", environment.Task(0, 0, "check"))])
            await client.close(["check-0"])
    except TimeoutError:
        raise ConfigError(f"{settings.address} did not answer within {CHECK_S:g} s: is an environment served there?") from None
    if isinstance(first, SlipstreamError):
        raise first
    seen = first.text if first.text is not None else first.messages if first.messages is not None else first.tokens
    print(f"task 0    {seen!r}")
    print(f"answer    {first.answer!r}")
