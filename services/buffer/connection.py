"""The way to Redis: which servers the ledger accepts, and how it is told why not.

At start the server is asked once: its INFO, its append-only file, and every command that the ledger's scripts use, on a key of
its own under the run's hash tag. What would fail or lose something later is refused now, in one line with the remedy. CONFIG is
read where it is allowed; where it is not, what cannot be verified is said in one line. WAITAOF is never used: see
docs/durability.md.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import redis.asyncio as aioredis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from slipstream.errors import ConfigError, Unavailable

Check = Literal["warn", "require", "trust"]

log = logging.getLogger("slipstream.buffer")
OLDEST = (7, 0)
SCHEMES = ("redis", "rediss", "unix")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# One command after the other, each told apart when it is denied: a script stops at its first error. The order cleans up.
COMMANDS = (
    "HSET k f 1", "HSETNX k g 1", "HGET k f", "HGETALL k", "HMGET k f", "HINCRBY k f 1", "HEXISTS k f", "HLEN k", "HKEYS k",
    "HDEL k f", "DEL k", "ZADD k 1 m", "ZSCORE k m", "ZCARD k", "ZRANGE k 0 -1", "ZRANGEBYSCORE k 0 1", "ZREM k m",
    "ZREMRANGEBYSCORE k 0 1", "DEL k", "XADD k * f 1", "XLEN k", "XRANGE k - +", "XDEL k 1-1", "DEL k", "RPUSH k e",
    "LRANGE k 0 -1", "LLEN k", "DEL k", "TIME")
_PROBE = """
local denied = {}
for _, line in ipairs(cjson.decode(ARGV[1])) do
  for i, word in ipairs(line) do if word == 'k' then line[i] = KEYS[1] end end
  local reply = redis.pcall(unpack(line))
  if type(reply) == 'table' and reply.err then denied[#denied + 1] = line[1] .. ': ' .. reply.err end
end
struct.unpack('<I4', struct.pack('<I4', 1))
return denied
"""


def connect(url: str, ca_file: str = "") -> aioredis.Redis:
    """A client whose calls fail at once when the server is away: the callers retry, and see it. Raises ConfigError.

    `ca_file`: PEM file of the authority that signed the server's certificate (rediss:// only); the system's when empty.
    """
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        sentinel = ": Sentinel is not asked for the primary, give the primary's own address" if "sentinel" in scheme else ""
        raise ConfigError(f"buffer.redis = {shown(url)!r}: the scheme is not one of {', '.join(SCHEMES)}{sentinel}")
    if ca_file and scheme != "rediss":
        raise ConfigError(f"buffer.redis_ca_file = {ca_file!r} and buffer.redis = {shown(url)!r} contradict: use rediss://")
    tls: dict[str, Any] = {"ssl_ca_certs": ca_file} if ca_file else {}
    try:
        return aioredis.Redis.from_url(
            url, socket_timeout=60, socket_connect_timeout=5, retry=Retry(NoBackoff(), 0), health_check_interval=0, **tls)
    except ValueError as error:
        raise ConfigError(f"buffer.redis = {shown(url)!r} is not a Redis URL: {error}") from error


def shown(url: str) -> str:
    """The URL for logs: without its password."""
    parts = urlsplit(url)
    if not parts.password:
        return url
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{parts.netloc.rpartition('@')[2]}"))


async def ping(client: aioredis.Redis, url: str) -> None:
    """One PING. Raises ConfigError for what no waiting mends (password, certificate), Unavailable for the rest."""
    try:
        await client.execute_command("PING")
    except (exceptions.RedisError, OSError) as error:
        if isinstance(error.__cause__ or error, (exceptions.AuthenticationError, exceptions.NoPermissionError)):
            raise ConfigError(
                f"buffer.redis: {shown(url)} refused the user or the password ({error}); "
                "correct redis://USER:PASSWORD@HOST:PORT/, or the server's ACL") from error
        if "CERTIFICATE_VERIFY_FAILED" in str(error) or "Hostname mismatch" in str(error):
            raise ConfigError(
                f"buffer.redis: the certificate of {shown(url)} is not trusted ({error}); set buffer.redis_ca_file to the PEM "
                "file of its authority, and use a host name that the certificate carries") from error
        raise Unavailable(f"Redis at {shown(url)} does not answer: {error}") from error


async def verify(
        client: aioredis.Redis, durability: str, check: Check = "warn", run: str = "probe", quota_bytes: int = 0) -> None:
    """Refuse a server that the ledger cannot use or that would lose what it acknowledges. Raises ConfigError.

    `check` decides about durability alone: warn = refuse what is known to be weaker, say what cannot be known; require = refuse
    that, too; trust = take the operator's word (a managed server that keeps a log of its own).
    """
    try:
        info = await client.info("everything")
    except exceptions.NoPermissionError as error:
        raise ConfigError(f"buffer.redis: INFO is denied ({error}): grant +info to the ACL user") from error
    _usable(info, quota_bytes)
    await _permitted(client, run, bool(int(info.get("cluster_enabled", 0))))
    if durability != "memory" and check != "trust":
        await _durable(client, info, durability, check)
    connection = client.connection_pool.connection_kwargs
    if issubclass(client.connection_pool.connection_class, aioredis.SSLConnection) or "path" in connection:
        return
    if connection.get("host", "localhost") not in _LOOPBACK:
        log.warning("buffer.redis: samples and password travel in plaintext to %s; use rediss://", connection.get("host"))


def _usable(info: dict[str, Any], quota_bytes: int) -> None:
    """What INFO tells of the kind of server."""
    version, policy = str(info.get("redis_version", "0")), info.get("maxmemory_policy", "noeviction")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise ConfigError(f"buffer.redis: version {version} is too old; 7.0 or newer is needed")
    if info.get("redis_mode") == "sentinel":
        raise ConfigError("buffer.redis: this is a Sentinel; give the address of the primary that it watches")
    if info.get("role") in ("slave", "replica"):
        raise ConfigError(
            f"buffer.redis: this is a read-only replica of {info.get('master_host')}:{info.get('master_port')}; give the "
            "primary's address")
    if policy != "noeviction":
        raise ConfigError(f"buffer.redis: maxmemory-policy = {policy} would drop samples; set it to noeviction")
    if 0 < (maxmemory := int(info.get("maxmemory", 0))) < quota_bytes:
        raise ConfigError(
            f"buffer.quota_bytes = {quota_bytes} is above the server's maxmemory = {maxmemory}: change one of them")


async def _permitted(client: aioredis.Redis, run: str, cluster: bool) -> None:
    """Run every command of the ledger on one key. In a cluster this also shows whether the run's slot is on this node."""
    key = f"slipstream:{{{run}}}:probe"
    try:
        denied = await client.execute_command("EVAL", _PROBE, 1, key, json.dumps([line.split() for line in COMMANDS]))
        async with client.pipeline(transaction=True) as pipe:
            pipe.hget(key, "f")
            pipe.xlen(key)
            await pipe.execute()
    except exceptions.NoPermissionError as error:
        raise ConfigError(
            f"buffer.redis: the ACL user may not do what the ledger does ({error}): grant "
            "+@read +@write +@transaction +eval +evalsha +time +info +ping ~slipstream:*") from error
    except (exceptions.MovedError, exceptions.ClusterDownError) as error:
        raise ConfigError(
            f"buffer.redis: in this cluster another node holds the keys of run {run} ({error}): use a server without cluster "
            "mode, or a cluster of one shard") from error
    except exceptions.ResponseError as error:
        raise ConfigError(f"buffer.redis: the server does not run Lua scripts ({error}): the ledger needs EVAL") from error
    if denied:
        reasons = "; ".join(line.decode() for line in denied)
        raise ConfigError(f"buffer.redis: the ledger's scripts may not run some commands ({reasons}): grant them to its user")
    if cluster:
        log.warning("buffer.redis is a cluster: all keys of run %s lie in one slot, and redirections are not followed", run)


async def _durable(client: aioredis.Redis, info: dict[str, Any], durability: str, check: Check) -> None:
    """Whether an acknowledgement means what buffer.durability says."""
    remedy = "enable it (appendonly yes), set buffer.durability = memory, or buffer.durability_check = trust"
    if not int(info.get("aof_enabled", 0)):
        raise ConfigError(f"buffer.durability = {durability}, but this Redis writes no append-only file; {remedy}")
    try:
        settings = {**await client.config_get("appendfsync"), **await client.config_get("no-appendfsync-on-rewrite")}
    except exceptions.ResponseError as error:
        if check == "require":
            raise ConfigError(
                f"buffer.durability = {durability} cannot be verified: CONFIG is denied ({error}); grant +config|get, or set "
                "buffer.durability_check = warn") from error
        log.warning("buffer.durability = %s cannot be verified: CONFIG is denied (%s)", durability, error)
        return
    fsync, pause = settings.get("appendfsync", ""), settings.get("no-appendfsync-on-rewrite", "no")
    if fsync == "no" or (durability == "always" and fsync != "always"):
        raise ConfigError(
            f"buffer.durability = {durability}, but Redis has appendfsync = {fsync}: set appendfsync {durability}, "
            f"or buffer.durability to what it really is")
    if pause == "yes":
        raise ConfigError(
            f"buffer.durability = {durability}, but Redis has no-appendfsync-on-rewrite = yes: nothing is fsynced while the "
            "file is rewritten; set it to no")
