"""Tokens of the secret: role tokens of a run on one machine, and signed tokens of outside clients with an end and a quota.

    role token      `Slipstream <role>:<hex>`, HMAC-SHA256(secret, role): good for as long as the secret, on loopback only
    signed token    `Bearer <claims>.<signature>`, both base64url: who, role, until when, how much

A secret file holds one secret a line. The first signs, every one is accepted, so a secret is changed without an interruption:
put the new one below, wait until every process has read it (RELOAD_S), put it on top, wait until the last old token has ended,
remove the old one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from google.rpc import code_pb2

from slipstream import logs, tls
from slipstream.errors import ConfigError, SlipstreamError

LEAST_BYTES = 16  # of a secret
RELOAD_S = 1.0
TOKEN_ROLES = ("client", "cli")  # roles that a signed token may carry: people and programs outside, never a service
ROLE_TOKEN, SIGNED_TOKEN = "Slipstream ", "Bearer "
_CONTEXT = b"slipstream token v1\n"  # a signature of ours never fits something else that the same secret signs

log = logs.get("auth")


class Unauthenticated(SlipstreamError):
    """The call proves no identity."""

    code = code_pb2.UNAUTHENTICATED


@dataclass(frozen=True, slots=True)
class Claims:
    """What a signed token says. `expires_unix` in seconds; quotas per minute, 0 = the service's default."""

    name: str
    role: str
    expires_unix: int
    calls_per_minute: int = 0
    bytes_per_minute: int = 0


class Keys:
    """The secrets of a run, newest first; follows its file."""

    def __init__(self, path: Path | None = None, fixed: Sequence[bytes] = (),
                 clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError for a file that others may read or that holds no secret; a missing one holds none."""
        self._path, self._secrets, self._clock = path, tuple(fixed), clock
        self._stamp: tuple[int, ...] | None = None
        self._looked = clock()
        if path is not None:
            self._stamp, self._secrets = _stamp(path), read_secrets(path)

    @property
    def secrets(self) -> tuple[bytes, ...]:
        """All that are accepted; empty = nobody is checked by token."""
        if self._path is not None and self._clock() - self._looked >= RELOAD_S:
            self._looked = self._clock()
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                self._reload(self._path)
        return self._secrets

    def _reload(self, path: Path) -> None:
        """A file that cannot be used, or is gone, leaves the former secrets: a slip must not open a service."""
        try:
            secrets = read_secrets(path)
        except ConfigError as error:
            log.warning(f"the new secret is not used, the former one is: {error.message}")
            return
        if secrets:
            self._secrets = secrets
            log.info("secrets read again", count=len(secrets))
        else:
            log.warning(f"{path} holds no secret any more, the former one is used")


def read_secrets(path: Path) -> tuple[bytes, ...]:
    """The secrets in a file, none when there is no file. Raises ConfigError when it cannot be used."""
    tls.private(path)
    try:
        lines = [line.strip() for line in path.read_bytes().splitlines() if line.strip()]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    for line in lines or [b""]:
        if len(line) < LEAST_BYTES:
            raise ConfigError(
                f"{path} holds {len(line)} bytes, at least {LEAST_BYTES} are needed: delete it and start again")
    return tuple(lines)


def role_token(secret: bytes, role: str) -> str:
    """The token of a role."""
    return hmac.new(secret, role.encode(), hashlib.sha256).hexdigest()


def role_by_token(header: str, secrets: Sequence[bytes]) -> str:
    """The role of a `Slipstream role:hex` header that one of the secrets made; "" for any other."""
    role, _, given = header.removeprefix(ROLE_TOKEN).partition(":")
    matches = [hmac.compare_digest(given.encode(), role_token(secret, role).encode()) for secret in secrets]
    return role if header.startswith(ROLE_TOKEN) and any(matches) else ""


def sign(claims: Claims, secret: bytes) -> str:
    """A token that says this. Raises ConfigError for claims that no service would accept."""
    if claims.role not in TOKEN_ROLES:
        raise ConfigError(
            f"role {claims.role!r} cannot have a signed token, only {' and '.join(TOKEN_ROLES)}: services prove their role by "
            "certificate")
    if not claims.name:
        raise ConfigError("a token needs a name: quotas and logs go by it")
    body = base64.urlsafe_b64encode(json.dumps(asdict(claims), separators=(",", ":")).encode()).rstrip(b"=")
    return f"{body.decode()}.{_signature(body, secret)}"


def verify(token: str, secrets: Sequence[bytes], now_unix: float) -> Claims:
    """What a token says. Raises Unauthenticated when no secret made it, or when it has ended."""
    body, _, given = token.partition(".")
    matches = [hmac.compare_digest(given.encode(), _signature(body.encode(), secret).encode()) for secret in secrets]
    if not any(matches):
        raise Unauthenticated(
            "the token was not made by a secret of this run: ask its owner for another (slipstream token)", "TOKEN_INVALID")
    claims = Claims(**json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))))
    if now_unix >= claims.expires_unix:
        raise Unauthenticated(
            f"the token of {claims.name} ended {now_unix - claims.expires_unix:.0f} s ago: ask the run's owner for another "
            "(slipstream token)", "TOKEN_EXPIRED", name=claims.name)
    return claims


def _signature(body: bytes, secret: bytes) -> str:
    digest = hmac.new(secret, _CONTEXT + body, hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
