"""Certificates as `slipstream doctor` looks at them: end, authority, role, use. That the key fits was seen before."""

from __future__ import annotations

import datetime
from pathlib import Path

from slipstream import tls, tls_authority
from slipstream.auth import ROLES
from slipstream.cli.doctor_finding import FAIL, OK, WARN, Finding
from slipstream.errors import ConfigError

x509 = tls_authority.x509
LATE = 6  # renewal is late when less than this part of the life is left; cert-manager renews at a third


def roles_in(folder: Path, run: str) -> list[str]:
    """The roles that a folder has certificates of: one per sub-folder, or the one that its own certificate names."""
    found = [role for role in ROLES if (folder / role / tls.CERTIFICATE).exists()]
    if found or not (folder / tls.CERTIFICATE).exists():
        return found or ["cli"]  # whose absence is then said
    try:
        leaf = x509.load_pem_x509_certificates((folder / tls.CERTIFICATE).read_bytes())[0]
    except ValueError:
        return ["cli"]
    return [tls.role_of({"peer_uri": _uris(leaf)}, run) or "cli"]


def certificate(files: tls.Certificates, run: str, now: datetime.datetime | None = None) -> Finding:
    """The first thing that is wrong with a role's certificate, or that nothing is. Raises ConfigError when it is no PEM."""
    name, pems = f"certificate {files.role}", files.current()
    now = now or datetime.datetime.now(datetime.UTC)
    try:
        leaf, *rest = x509.load_pem_x509_certificates(pems.chain)
        trusted = x509.load_pem_x509_certificates(pems.authority)
    except ValueError as error:
        raise ConfigError(f"{files.folder}: {error}") from None
    issuer = _issuer(leaf, rest, trusted)
    if problem := _misused(leaf, files.role, run) or _out_of_time(leaf, now, "it"):
        return Finding(name, FAIL, f"{files.folder / tls.CERTIFICATE}: {problem}")
    if issuer is None:
        return Finding(name, FAIL, f"{files.folder}: no authority in {tls.AUTHORITY} issued {tls.CERTIFICATE}, so nobody lets "
                       "it in: take both from one issue")
    if problem := _out_of_time(issuer, now, "its authority"):
        return Finding(name, FAIL, f"{files.folder / tls.AUTHORITY}: {problem}")
    left, life = leaf.not_valid_after_utc - now, leaf.not_valid_after_utc - leaf.not_valid_before_utc
    of_run = "this run" if run and tls.identity(files.role, run) in {u.decode() for u in _uris(leaf)} else "any"
    told = f"ends in {_span(left)}; run {of_run}; authority {issuer.subject.rfc4514_string()}"
    if left < life / LATE:
        return Finding(name, WARN, f"{told}: late, {tls.RENEWAL}")
    return Finding(name, OK, told)


def _misused(leaf: x509.Certificate, role: str, run: str) -> str:
    """What the certificate says of its role and use, when that is wrong."""
    if tls.role_of({"peer_uri": _uris(leaf)}, run) != role:
        return (f"it is not of role {role}, run {run}: its URIs are {', '.join(u.decode() for u in _uris(leaf)) or 'none'}; it "
                f"needs one, {tls.identity(role)} or {tls.identity(role, run)}")
    if tls.server_name(role) not in _names(leaf):
        return f"its DNS names lack {tls.server_name(role)}, by which others know this service: add it"
    try:
        usages = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return ""
    oids = x509.oid.ExtendedKeyUsageOID
    lacking = [n for n, oid in (("server auth", oids.SERVER_AUTH), ("client auth", oids.CLIENT_AUTH)) if oid not in usages]
    return f"it is not good for {' and '.join(lacking)}: services do both, add the usage" if lacking else ""


def _out_of_time(found: x509.Certificate, now: datetime.datetime, whose: str) -> str:
    if now >= found.not_valid_after_utc:
        return f"{whose} ended {_span(now - found.not_valid_after_utc)} ago: {tls.RENEWAL}"
    if now < found.not_valid_before_utc:
        return f"{whose} begins in {_span(found.not_valid_before_utc - now)}: set this machine's clock, or {tls.RENEWAL}"
    return ""


def _issuer(
    leaf: x509.Certificate, between: list[x509.Certificate], trusted: list[x509.Certificate],
) -> x509.Certificate | None:
    """The trusted authority at the end of the chain; None when there is none."""
    current = leaf
    for _ in range(len(between) + 1):
        if found := next((c for c in trusted if _issued(current, c)), None):
            return found
        step = next((c for c in between if c != current and _issued(current, c)), None)
        if step is None:
            return None
        current = step
    return None


def _issued(child: x509.Certificate, parent: x509.Certificate) -> bool:
    try:
        child.verify_directly_issued_by(parent)
    except Exception:  # names differ, another kind of key, a wrong signature: each has its own type, none is the issuer
        return False
    return True


def _alternatives(found: x509.Certificate) -> x509.SubjectAlternativeName | None:
    try:
        return found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None


def _uris(found: x509.Certificate) -> list[bytes]:
    names = _alternatives(found)
    return [u.encode() for u in names.get_values_for_type(x509.UniformResourceIdentifier)] if names else []


def _names(found: x509.Certificate) -> list[str]:
    names = _alternatives(found)
    return names.get_values_for_type(x509.DNSName) if names else []


def _span(span: datetime.timedelta) -> str:
    seconds = span.total_seconds()
    return f"{seconds / 86400:.0f} days" if seconds > 2 * 86400 else f"{seconds / 3600:.1f} h" if seconds > 3600 else (
        f"{seconds:.0f} s")
