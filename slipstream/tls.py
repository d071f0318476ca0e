"""Certificates of a process: where they lie, how they are renewed without a restart, whose they are.

A folder holds `tls.crt` (chain), `tls.key` and `ca.crt`, as a Secret of cert-manager is mounted. A folder with one sub-folder
per role, DIR/rollout/tls.crt and so on, is what `slipstream certs DIR` writes; a process takes the one of its role.

A certificate names its role twice:
    URI    spiffe://slipstream/<role>, or spiffe://slipstream/<role>/<run> for one run only: what a server goes by
    DNS    <role>.slipstream.internal: what a client goes by. Addresses are in no certificate, so pods and ports may change.

consumes      the three files
produces      credentials of servers and channels
waits for     nothing: files are looked at when a connection is made (server) or a call starts (client)
unblocked by  -
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from slipstream import logs
from slipstream.errors import ConfigError, Unavailable

CERTIFICATE, KEY, AUTHORITY = FILES = ("tls.crt", "tls.key", "ca.crt")
URI = "spiffe://slipstream/"
DOMAIN = "slipstream.internal"
CONNECTION_S = 3600.0  # a connection is not older than this, and so no certificate is used long after its end
RENEWAL = "renew it (cert-manager does; on a laptop: slipstream certs DIR)"

log = logs.get("tls")


@dataclass(frozen=True, slots=True)
class Pems:
    """One state of the files. `stamp` tells states apart."""

    key: bytes
    chain: bytes
    authority: bytes
    stamp: tuple[tuple[int, ...], ...]


def server_name(role: str) -> str:
    """The name by which a client knows a server of this role."""
    return f"{role}.{DOMAIN}"


def identity(role: str, run: str = "") -> str:
    """The URI by which a server knows a client; without a run it is good for every run of the authority."""
    return f"{URI}{role}/{run}" if run else f"{URI}{role}"


def role_of(properties: Mapping[str, Iterable[bytes]], run: str) -> str:
    """The role in a verified certificate, given a call's auth_context(): "" when it names none, several, or another run's.

    Only URIs count: whoever may have a DNS name of their choice must not get a role by it.
    """
    found = set()
    for uri in properties.get("peer_uri", ()):
        role, _, of_run = uri.decode(errors="replace").removeprefix(URI).partition("/")
        if uri.startswith(URI.encode()) and of_run in ("", run):
            found.add(role)
    return found.pop() if len(found) == 1 else ""


class Certificates:
    """Key, certificate and authority of one role. `current()` follows the files; safe in threads: gRPC asks from its own."""

    def __init__(self, folder: Path, role: str) -> None:
        """Raises ConfigError when the files are missing, unreadable, open to others, or do not belong together."""
        own = folder / role
        self.folder = own if (own / CERTIFICATE).exists() else folder
        self.role = role
        self._lock = threading.Lock()
        self._refused: object = None
        private(self.folder / KEY)
        try:
            self._pems = self._read()
        except Unavailable as error:
            raise ConfigError(error.message) from None

    def current(self) -> Pems:
        """The newest state that is whole. Half-written or mismatched files are said once, and the former state serves on."""
        with self._lock:
            try:
                stamp = self._stamp()
                if stamp not in (self._pems.stamp, self._refused):
                    self._pems = self._read()
                    log.info("certificates renewed", folder=str(self.folder))
            except (OSError, ConfigError, Unavailable) as error:
                stamp = self._stamp_or_none()
                if stamp != self._refused:
                    self._refused = stamp
                    log.warning(f"new certificates are not used, the former ones serve on: {error}", folder=str(self.folder))
            return self._pems

    def server_credentials(self, ask_client: bool = True) -> grpc.ServerCredentials:
        """For a port: every new connection gets the newest certificate; `ask_client` refuses whoever has none."""
        given: list[Pems] = [self.current()]

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            pems = self.current()
            if pems is given[0]:
                return None
            given[0] = pems
            return _configuration(pems)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(given[0]), renewed,  # pyright: ignore[reportArgumentType]  # None means no change, say its docs
            require_client_authentication=ask_client)

    def _stamp(self) -> tuple[tuple[int, ...], ...]:
        found = ((self.folder / name).stat() for name in FILES)
        return tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in found)

    def _stamp_or_none(self) -> object:
        try:
            return self._stamp()
        except OSError as error:
            return str(error)

    def _read(self) -> Pems:
        """Read all three between two equal looks, and see that they belong together. Raises ConfigError, Unavailable."""
        certificate, key, authority = (self.folder / name for name in FILES)
        try:
            stamp = self._stamp()
            pems = Pems(key.read_bytes(), certificate.read_bytes(), authority.read_bytes(), stamp)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key, password=lambda: "")  # an encrypted key must not ask at a terminal
            context.load_verify_locations(cadata=pems.authority.decode("ascii", "replace"))
            if self._stamp() != stamp:
                raise Unavailable(f"{self.folder}: files changed while they were read; read again")
        except FileNotFoundError as error:
            raise ConfigError(
                f"security.tls_dir: {error.filename} does not exist: it takes {', '.join(FILES)}, or a folder per role; "
                "`slipstream certs DIR` makes them for this machine") from None
        except ssl.SSLError as error:
            raise ConfigError(
                f"security.tls_dir: {certificate}, {KEY} and {AUTHORITY} are not PEM files that belong together "
                f"({error.reason or error}): take all three from one issue") from None
        except OSError as error:
            raise ConfigError(f"security.tls_dir: {error.filename} cannot be read: {error.strerror}") from None
        return pems


def private(path: Path) -> None:
    """Raises ConfigError when others may read a secret file. A mounted Secret belongs to root and is read through its group."""
    try:
        found = path.stat()
    except OSError:
        return  # whoever reads it says so
    if found.st_mode & (0o007 if found.st_uid == 0 else 0o077):
        raise ConfigError(f"{path} can be read by others: chmod 600 {path}")


def channel_credentials(pems: Pems) -> grpc.ChannelCredentials:
    """For a channel that shows its certificate."""
    return grpc.ssl_channel_credentials(pems.authority, pems.key, pems.chain)


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.chain)], pems.authority)
