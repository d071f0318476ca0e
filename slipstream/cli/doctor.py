"""`slipstream doctor`: what would be refused, or should have been, before a service is started. One line a check, with remedy.

    ok    certificate trainer   ends in 89 days; run any; authority "slipstream development"
    FAIL  plaintext             buffer.redis = redis://10.0.0.5:6379 is not on this machine: use rediss://

Exit code 0 when nothing fails; a warning does not fail. It changes nothing but a probe object, which it deletes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from slipstream import auth_tokens, rpc, tls
from slipstream.auth import ROLES
from slipstream.cli import doctor_ranks, doctor_stores, preflight
from slipstream.cli.doctor_finding import FAIL, OK, WARN, Finding
from slipstream.config import RunFile, load
from slipstream.errors import ConfigError, SlipstreamError

WAIT_S = 20.0  # for one check


@dataclass(frozen=True)
class Given:
    """What the command line says beside the run file."""

    roles: Sequence[str] = ()
    tls_dir: str = ""
    secret_file: str = ""
    expect_hash: str = ""


def doctor(run_file: Path, overrides: Sequence[str], given: Given) -> int:
    """Print every finding; 1 when one of them fails. Raises ConfigError for a run file that cannot be read."""
    if unknown := next((r for r in given.roles if r not in ROLES), None):
        raise ConfigError(f"--role {unknown!r} is not a role; known: {', '.join(ROLES)}")
    found = asyncio.run(examine(load(run_file, overrides), given))
    for finding in found:
        print(f"{finding.state:<5} {finding.name:<24} {finding.text}")
    failed = sum(f.state == FAIL for f in found)
    print(f"{len(found)} checks, {failed} failed" if failed else f"{len(found)} checks, none failed")
    return 1 if failed else 0


async def examine(run: RunFile, given: Given) -> list[Finding]:
    """Every finding, in order. A check that itself fails is a finding, too."""
    checks: list[tuple[str, Callable[[], Awaitable[Sequence[Finding]]]]] = [
        ("run file", _in_line(lambda: run_file(run, given))),
        ("certificates", _in_line(lambda: certificates(run, given))),
        ("secret", _in_line(lambda: secret(run, given))),
        ("plaintext", _in_line(lambda: plaintext(run, given))),
        *([("model", _in_line(lambda: model(run)))] if not given.roles or {"trainer", "rollout"} & set(given.roles) else []),
        ("trainer.parallel", lambda: doctor_ranks.ranks(run, given.roles)),
        ("objects", lambda: doctor_stores.objects(run, given.roles))]
    if not given.roles or "buffer" in given.roles:  # nobody else talks to Redis
        checks.insert(-1, ("redis", lambda: doctor_stores.redis(run)))
    found: list[Finding] = []
    for name, check in checks:
        try:
            async with asyncio.timeout(WAIT_S):
                found += await check()
        except TimeoutError:
            found.append(Finding(name, FAIL, f"no answer within {WAIT_S:g} s: check the address and what lies between"))
        except SlipstreamError as error:
            found.append(Finding(name, FAIL, error.message))
    return found


def _in_line(check: Callable[[], Iterator[Finding]]) -> Callable[[], Awaitable[Sequence[Finding]]]:
    async def run() -> Sequence[Finding]:
        return list(check())

    return run


def run_file(run: RunFile, given: Given) -> Iterator[Finding]:
    """Every process of a run reads the same settings: the buffer refuses a worker whose hash differs."""
    if given.expect_hash and not run.hash.startswith(given.expect_hash):
        yield Finding(
            "run file", FAIL, f"hash {run.hash[:16]} is not {given.expect_hash}: give every service the same run file")
    else:
        yield Finding("run file", OK, f"{run.run.name}, hash {run.hash[:16]}" + (" as expected" if given.expect_hash else ""))


def model(run: RunFile) -> Iterator[Finding]:
    """What those that hold weights load is there."""
    preflight.model(run)
    preflight.packages(run)
    preflight.node_folder(run)
    yield Finding("model", OK, f"{run.model.path} is there" if run.model.path else "built from model.build")


def certificates(run: RunFile, given: Given) -> Iterator[Finding]:
    """Every role's files, and the key that signs them."""
    folder = given.tls_dir or run.security.tls_dir
    if not folder:
        yield Finding("certificates", OK, "none: services listen on loopback only (security.tls_dir is empty)")
        return
    from slipstream.cli.doctor_certificates import certificate, roles_in

    for role in given.roles or roles_in(Path(folder), run.run.name):
        try:
            yield certificate(tls.Certificates(Path(folder), role), run.run.name)
        except ConfigError as error:
            yield Finding(f"certificate {role}", FAIL, error.message)
    authority = Path(folder) / "authority" / "ca.key"
    if authority.exists():
        try:
            tls.private(authority)
            yield Finding("authority", WARN, f"{authority} is with the certificates: services need no such key, move it away")
        except ConfigError as error:
            yield Finding("authority", FAIL, error.message)


def secret(run: RunFile, given: Given) -> Iterator[Finding]:
    """The file of the secrets is there for its owner alone, and no rotation was forgotten."""
    path = Path(given.secret_file or run.security.secret_file or run.folder / "secret")
    try:
        secrets = auth_tokens.read_secrets(path)
    except ConfigError as error:
        yield Finding("secret", FAIL, error.message)
        return
    named = given.secret_file or run.security.secret_file
    if not secrets:
        yield Finding("secret", FAIL if named else OK, f"{path} does not exist" + (
            ": create it (mode 600), or remove the setting" if named else "; slipstream run makes one"))
    elif len(secrets) > 2:
        yield Finding(
            "secret", WARN, f"{path} holds {len(secrets)} secrets and each is accepted: remove those of former rotations")
    else:
        yield Finding("secret", OK, f"{path}, {len(secrets)} accepted, for its owner alone")


def plaintext(run: RunFile, given: Given) -> Iterator[Finding]:
    """Whatever leaves this machine is encrypted."""
    encrypted, found = bool(given.tls_dir or run.security.tls_dir), False
    places = [("service.buffer_address", run.service.buffer_address, "set security.tls_dir", encrypted)]
    places += [(f"environments.{e.name}.address", e.address, "set security.tls_dir and remove insecure",
                encrypted and not e.insecure) for e in run.environments]
    urls = (("buffer.redis", run.buffer.redis, "rediss"), ("objects.endpoint", run.objects.endpoint, "https"))
    for name, url, scheme in urls:
        parts = urlsplit(url)
        host = f"{parts.hostname or ''}:{parts.port or 0}" if parts.scheme != "unix" else ""
        places.append((name, host if parts.hostname else "", f"use {scheme}://", parts.scheme == scheme))
    for name, address, remedy, fine in places:
        if address and not fine and not rpc.is_loopback(address):
            found = True
            yield Finding("plaintext", FAIL, f"{name} is at {address}, not on this machine, and plaintext: {remedy}")
    if not found:
        yield Finding("plaintext", OK, "nothing that the run file names is reached in plaintext off this machine")
