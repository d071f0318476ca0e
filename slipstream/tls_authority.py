"""A certificate authority for tests, laptops and documentation. On a cluster cert-manager does this, with the same names.

    authority = create_authority(folder, clock)      folder/authority/{ca.crt, ca.key}; the key signs and is mounted nowhere
    issue(authority, folder / "rollout", "rollout")  folder/rollout/{tls.crt, tls.key, ca.crt}

Files are replaced whole, key before certificate before authority: a process that looks in between sees a pair that does not
match and goes on with the former one (tls.Certificates).
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

from slipstream import tls
from slipstream.errors import ConfigError

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ModuleNotFoundError:  # said by whoever runs the command, not by a traceback
    raise ConfigError("certificates are read and made with cryptography: pip install 'slipstream[certs]'") from None

BACKDATED = datetime.timedelta(minutes=5)  # clocks differ
AUTHORITY_DAYS, CERTIFICATE_DAYS = 3650, 90


@dataclass(frozen=True)
class Authority:
    """A certificate that signs others, with its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)


def create_authority(name: str = "slipstream development") -> Authority:
    """A new authority, only in memory."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False)
    builder = _builder(name, name, key.public_key(), now, datetime.timedelta(days=AUTHORITY_DAYS))
    return Authority(
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).add_extension(usage, critical=True)
        .sign(key, hashes.SHA256()), key)


def open_authority(folder: Path) -> Authority:
    """The authority kept in a folder, made when there is none. Raises ConfigError."""
    certificate, key = folder / "ca.crt", folder / "ca.key"
    if key.exists():
        try:
            found = serialization.load_pem_private_key(key.read_bytes(), password=None)
            assert isinstance(found, ec.EllipticCurvePrivateKey)
            return Authority(x509.load_pem_x509_certificate(certificate.read_bytes()), found)
        except (OSError, ValueError, TypeError, AssertionError) as error:
            raise ConfigError(
                f"{folder} holds no authority that can be used ({error}): delete it to make a new one; every certificate of "
                "the old one ends with it") from None
    authority = create_authority()
    folder.mkdir(parents=True, exist_ok=True)
    _write(key, _key_pem(authority.key))
    _write(certificate, authority.pem, 0o644)
    return authority


def issue(
    authority: Authority, folder: Path, role: str, run: str = "", lifetime: datetime.timedelta | None = None,
    uris: tuple[str, ...] | None = None, starts: datetime.datetime | None = None, trusted: bytes = b"",
) -> None:
    """Write tls.crt, tls.key and ca.crt for a role. `uris` replaces what the certificate says of its role, `trusted` (PEM) whom
    its owner trusts: this authority, unless one replaces another."""
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.DNSName(tls.server_name(role)), *(
        x509.UniformResourceIdentifier(uri) for uri in (uris if uris is not None else (tls.identity(role, run),)))]
    builder = _builder(
        role, authority.certificate.subject, key.public_key(), starts or datetime.datetime.now(datetime.UTC),
        lifetime or datetime.timedelta(days=CERTIFICATE_DAYS))
    usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        builder.add_extension(x509.SubjectAlternativeName(names), critical=False).add_extension(usages, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True).sign(authority.key, hashes.SHA256()))
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / tls.KEY, _key_pem(key))
    _write(folder / tls.CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    _write(folder / tls.AUTHORITY, trusted or authority.pem, 0o644)


def _builder(
    name: str, issuer: str | x509.Name, public: ec.EllipticCurvePublicKey, now: datetime.datetime, lifetime: datetime.timedelta,
) -> x509.CertificateBuilder:
    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    return (
        x509.CertificateBuilder().subject_name(named(name)).issuer_name(named(issuer) if isinstance(issuer, str) else issuer)
        .public_key(public).serial_number(x509.random_serial_number()).not_valid_before(now - BACKDATED)
        .not_valid_after(now + lifetime))


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _write(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file whole; its mode is right from the first byte on."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    temporary.replace(path)
