"""What one process proves itself with, and what it checks others by: certificates, secrets, a token, quotas.

Example:
    credentials = of(run, "rollout")
    channel = rpc.channel(address, credentials=credentials, peer="buffer")
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from slipstream.auth_tokens import ROLE_TOKEN, SIGNED_TOKEN, Keys, role_token
from slipstream.config import RunFile, load
from slipstream.config_security import Security
from slipstream.errors import ConfigError
from slipstream.tls import Certificates

HEADER = "authorization"


@dataclass(frozen=True, slots=True)
class Credentials:
    """See the module's text. Everything is optional: without any of it nothing is proved and nobody is checked.

    `authority` is for programs outside without a certificate: the PEM file that proves the server, beside their `token`.
    """

    role: str = ""
    run: str = ""
    keys: Keys = field(default_factory=Keys)
    certificates: Certificates | None = None
    token: str = ""
    authority: Path | None = None
    calls_per_minute: int = 0  # of an outside client whose token names no quota
    bytes_per_minute: int = 0
    own_calls_per_minute: int = 0  # of one role at one address
    own_bytes_per_minute: int = 0

    @property
    def secure(self) -> bool:
        """Whether connections are encrypted."""
        return self.certificates is not None or self.authority is not None

    @property
    def checks(self) -> bool:
        """Whether a server with these knows its callers."""
        return self.certificates is not None or bool(self.keys.secrets)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What is sent with each call: a signed token when there is one; without certificates, the token of the role."""
        if self.token:
            return ((HEADER, SIGNED_TOKEN + self.token),)
        if self.secure or not self.role or not self.keys.secrets:
            return ()
        return ((HEADER, f"{ROLE_TOKEN}{self.role}:{role_token(self.keys.secrets[0], self.role)}"),)


def of(run: RunFile, role: str, tls_dir: str = "", secret_file: str = "") -> Credentials:
    """The credentials of a process of a run; a command line's `tls_dir` and `secret_file` win. Raises ConfigError."""
    security, folder, secret = run.security, tls_dir or run.security.tls_dir, secret_file or run.security.secret_file
    if secret and not Path(secret).exists():
        raise ConfigError(f"security.secret_file = {secret} does not exist: create it (mode 600) or remove the setting")
    return Credentials(
        role, run.run.name, Keys(Path(secret) if secret else run.folder / "secret"),
        Certificates(Path(folder), role) if folder else None,
        calls_per_minute=security.client_calls_per_minute, bytes_per_minute=security.client_bytes_per_minute,
        own_calls_per_minute=security.calls_per_minute, own_bytes_per_minute=security.bytes_per_minute)


def of_folder(folder: Path, role: str) -> Credentials:
    """The credentials for the run in a folder, by its resolved run file; without one, by its secret alone."""
    if (folder / "run.json").exists():
        return of(load(folder / "run.json"), role)
    return Credentials(role, keys=Keys(folder / "secret"))


def fixed(secret: bytes, role: str = "") -> Credentials:
    """One secret that does not change, for tests and benchmarks."""
    settings = Security()
    return Credentials(
        role, keys=Keys(fixed=(secret,) if secret else ()), calls_per_minute=settings.client_calls_per_minute,
        bytes_per_minute=settings.client_bytes_per_minute)
