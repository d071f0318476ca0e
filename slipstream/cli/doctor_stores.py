"""Redis and the object store as `slipstream doctor` looks at them: reached, durable, and no more open than need be."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.cli.doctor_finding import FAIL, OK, WARN, Finding
from slipstream.config import RunFile
from slipstream.errors import SlipstreamError
from slipstream.objects import ObjectStore, open_store

REACH_S = 5.0
OWNERS = {"versions": "trainer", "checkpoints": "trainer", "batches": "buffer"}  # who alone writes this; rollout: routes/
Config = dict[str, Any]


async def redis(run: RunFile) -> list[Finding]:
    """Whether Redis answers, how it is reached, and whether an acknowledgement means what buffer.durability says."""
    from redis.asyncio import Redis
    from redis.exceptions import RedisError, ResponseError

    if not run.buffer.redis:
        return [Finding("redis", OK, f"embedded on a unix socket, durability {run.buffer.durability}")]
    shown = re.sub(r":[^:@/]*@", ":***@", run.buffer.redis)
    tls: Config = {"ssl_ca_certs": run.buffer.redis_ca_file or None} if run.buffer.redis.startswith("rediss:") else {}
    try:
        client = Redis.from_url(
            run.buffer.redis, socket_connect_timeout=REACH_S, socket_timeout=REACH_S, decode_responses=True, **tls)
        async with client:
            info: Config = await client.info("everything")
            try:
                settings: Any = await client.config_get("appendfsync")
            except ResponseError:
                settings = {}
            try:
                user = str(await client.execute_command("ACL", "WHOAMI"))
            except ResponseError:
                user = ""
    except (RedisError, OSError, ValueError) as error:
        return [Finding(
            "redis", FAIL, f"{shown} does not answer ({error}): start it, or correct buffer.redis and redis_ca_file")]
    found = [Finding("redis", OK, f"{shown} answers, version {info.get('redis_version')}{', TLS' if tls else ''}")]
    if user == "default" and not run.buffer.redis.startswith("unix:"):
        found.append(Finding("redis user", WARN, "the default user may do anything: make one with ~slipstream:* alone"))
    return [*found, _durability(run, info, settings)]


def _durability(run: RunFile, info: Config, settings: Config) -> Finding:
    name, wanted = "redis durability", run.buffer.durability
    if wanted == "memory":
        return Finding(name, OK, "buffer.durability = memory: what Redis holds is rebuilt from the batch log after a loss")
    if not int(info.get("aof_enabled", 0)):
        return Finding(
            name, FAIL, f"buffer.durability = {wanted}, but this Redis writes no append-only file: set appendonly yes")
    if not settings:
        trusted = run.buffer.durability_check == "trust"
        return Finding(name, OK if trusted else WARN, "cannot be verified, CONFIG is denied" + (
            "; taken on trust" if trusted else ": grant +config|get, or set buffer.durability_check = trust"))
    fsync = settings.get("appendfsync", "")
    if fsync == "no" or (wanted == "always" and fsync != "always"):
        return Finding(name, FAIL, f"buffer.durability = {wanted}, but appendfsync = {fsync}: set appendfsync {wanted}")
    return Finding(name, OK, f"appendfsync {fsync}, as buffer.durability = {wanted} needs")


async def objects(run: RunFile, roles: Sequence[str]) -> list[Finding]:
    """Whether the store honours conditions for those who write, and refuses those who must not."""
    found = []
    if run.objects_url.startswith("file://") and not Path(run.objects_url.removeprefix("file://")).exists():
        return [Finding("objects", OK, f"{run.objects_url} is made at the start of the run")]
    async with open_store(run.objects_url, run.objects.endpoint, run.objects.region) as store:
        if not roles or any(role in OWNERS.values() for role in roles):
            await store.probe()
            found.append(Finding("objects", OK, f"{store.url} is writable and honours conditions"))
        if run.objects_url.startswith("file://"):
            return [*found, _folder(Path(run.objects_url.removeprefix("file://")))]
        return [*found, *[await least(store, role) for role in roles]]


def _folder(path: Path) -> Finding:
    """A file store has one owner for all roles, so what counts is who else gets in."""
    if path.stat().st_mode & 0o002:
        return Finding("objects folder", FAIL, f"{path} can be written by everybody on this machine: chmod o-w {path}")
    return Finding("objects folder", OK, f"{path}: one owner for all roles; on a cluster, S3 tells them apart")


async def least(store: ObjectStore, role: str) -> Finding:
    """Try what the identity of this role must not be able to do."""
    others = [prefix for prefix, owner in OWNERS.items() if owner != role]
    for prefix in others:
        key = f"{prefix}/doctor-{os.urandom(8).hex()}"
        try:
            await store.put_if_absent(key, b"slipstream doctor")
        except SlipstreamError as error:
            if error.reason != "S3_ACCESS":
                raise
            continue
        await store.delete(key)
        return Finding(f"objects {role}", FAIL, f"this identity may write {prefix}/ in {store.url}, which only the "
                       f"{OWNERS[prefix]} needs: narrow its policy")
    return Finding(f"objects {role}", OK, f"may not write {', '.join(others)} in {store.url}")
