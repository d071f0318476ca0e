"""What can be known to fail is said before anything is started: one ConfigError, one line, with the remedy.

`python -m slipstream.cli.preflight SETTING MODULE:NAME` checks that a user's code can be imported, in a process of its own, so
that whatever it loads stays out of the supervisor.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from slipstream import auth_credentials
from slipstream.cli import interpreters
from slipstream.config import Environment, RunFile
from slipstream.errors import ConfigError
from slipstream.service_command import SERVICES

BUILT_IN_SCORERS = ("exact", "numeric", "regex")
REACH_S = 5.0  # an environment or Redis answers within this


async def check(run: RunFile) -> None:
    """Raises ConfigError for the first thing that cannot work."""
    tasks(run)
    model(run)
    packages(run)
    node_folder(run)
    certificates(run)
    await redis(run)
    await asyncio.gather(*(environment(settings, run) for settings in run.environments))
    buffer_port(run)
    if run.trainer.parallel.ranks > 1:  # whose start takes longer than this, and ends in many logs
        await built_model(run)


Look = Callable[[RunFile], Awaitable[None] | None]


async def problems(run: RunFile) -> list[str]:
    """Everything that `check` would refuse, and whether the model can be built and run: for --dry-run, which has the time."""
    return await _problems(run, [
        tasks, model, packages, node_folder, certificates, redis,
        *(functools.partial(environment, e) for e in run.environments), buffer_port, built_model])


async def problems_of_sft(run: RunFile) -> list[str]:
    """The same of `slipstream sft`."""
    return await _problems(run, [supervised, dataset, model, packages, built_model])


async def _problems(run: RunFile, looks: Sequence[Look]) -> list[str]:
    found: list[str] = []
    for look in looks:
        try:
            result = look(run)
            if result is not None:
                await result
        except ConfigError as error:
            found.append(error.message)
    return found


def supervised(run: RunFile) -> None:
    """There is something to fine-tune on."""
    if run.sft is None:
        raise ConfigError("the run file has no table [sft]: name a dataset with sft.path, as in examples/sft/run.toml")


async def dataset(run: RunFile) -> None:
    """The dataset of [sft] can be read."""
    from slipstream.environments import dataset_files

    if run.sft is not None:
        await dataset_files.of_sft(run.sft)


async def built_model(run: RunFile) -> None:
    """The model that is to be built can be built and run, prompts fit into rollout.context, and on several ranks any model can
    be spread over them: tried in a process of its own, which loads torch and users' environments.
    """
    alone = run.trainer.parallel.ranks == 1
    if (run.model.build is None and (alone or run.model.gguf_file)) or importlib.util.find_spec("transformers") is None:
        return
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(run.model_dump(mode="json"), file)
        file.flush()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.trainer.check", "--run-file", file.name,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE)
        _, said = await process.communicate()
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        raise ConfigError(lines[-1] if lines else "model.build: trying it ended the process")


def tasks(run: RunFile) -> None:
    """There is an environment to take tasks from."""
    if not run.environments:
        raise ConfigError("environments is empty: this run file is one for `slipstream sft`; name an environment to run it")


def model(run: RunFile) -> None:
    """The model directory exists and holds what is going to be loaded."""
    settings = run.model
    if not settings.path:
        return
    path = Path(settings.path)
    if not path.is_dir():
        where = f"{path.resolve()} is" if path.resolve() != path else "that is"
        raise ConfigError(f"model.path = {settings.path}: {where} not a directory; download the model there, or "
                          "set model.path to a Hugging Face model directory")
    needed = settings.gguf_file or "config.json"
    if not (path / needed).is_file():
        raise ConfigError(f"model.path = {settings.path}: it holds no {needed}; set model.path to a directory with "
                          + ("that GGUF file" if settings.gguf_file else "config.json, weights and tokenizer"))


def packages(run: RunFile) -> None:
    """The optional packages that this run needs are installed."""
    needed = [("torch", "torch"), ("transformers", "torch"), ("safetensors", "torch")]
    if run.model.gguf_file:
        needed.append(("gguf", "gguf"))
    if run.model.lora:
        needed.append(("peft", "lora"))
    if run.objects_url.startswith("s3://"):
        needed.append(("aiobotocore", "s3"))
    if run.tracing.endpoint:
        needed.append(("opentelemetry", "tracing"))
    for package, extra in needed:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{package} is not installed: pip install 'slipstream[{extra}]'")
    interpreters.check(run)


def node_folder(run: RunFile) -> None:
    """The folder of versions that workers of this machine share is one, or can be made."""
    if not run.objects.near.cache:
        return
    folder = Path(run.objects.near.cache).absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"objects.near.cache = {str(folder)!r} is no folder and cannot be made: name one that this user may "
                          "write to, or remove the setting")


async def redis(run: RunFile) -> None:
    """A Redis that the run file names answers."""
    if not run.buffer.redis:
        return
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    try:
        tls: dict[str, Any] = {}
        if run.buffer.redis.startswith("rediss:"):
            tls["ssl_ca_certs"] = run.buffer.redis_ca_file or None
        client = Redis.from_url(run.buffer.redis, socket_connect_timeout=REACH_S, socket_timeout=REACH_S, **tls)
        async with client:
            await client.ping()  # pyright: ignore[reportGeneralTypeIssues]
    except (RedisError, OSError, ValueError) as error:
        named = re.sub(r":[^:@/]*@", ":***@", run.buffer.redis)  # without the password
        raise ConfigError(f"buffer.redis = {named} does not answer ({error}): start it, correct the URL, or remove "
                          "the setting to use the embedded server") from None


def certificates(run: RunFile) -> None:
    """Every process that this machine starts has a certificate of its role."""
    for role in (*SERVICES, "cli") if run.security.tls_dir else ():
        auth_credentials.of(run, role)


async def environment(settings: Environment, run: RunFile) -> None:
    """The environment answers, its class can be built, its scorer can be imported."""
    from slipstream import environment as sdk

    place = f"environments.{settings.name}"
    if settings.address:
        await reachable(f"{place}.address", settings.address)
        try:
            await asyncio.wait_for(sdk.describe(settings, auth_credentials.of(run, "cli")), REACH_S)
        except TimeoutError:
            raise ConfigError(f"{place}.address = {settings.address} did not describe itself within {REACH_S:g} s: is an "
                              "environment served there? `slipstream env check` asks it") from None
    elif settings.entry.startswith("slipstream."):
        sdk.load(settings.entry, settings.args, f"{place}.entry")
    else:
        await importable(f"{place}.entry", settings.entry, settings.args)
    if ":" in settings.scorer:
        await importable(f"{place}.scorer", settings.scorer)
    elif settings.scorer and settings.scorer not in BUILT_IN_SCORERS:
        raise ConfigError(f"{place}.scorer = {settings.scorer!r} is not a scorer; known: {', '.join(BUILT_IN_SCORERS)}, or "
                          'your own as "module:function"')


async def reachable(setting: str, address: str) -> None:
    """Somebody listens at host:port. Raises ConfigError; sooner than a gRPC channel, which would try again."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{setting} = {address!r} is not of the form host:port")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), REACH_S)
    except (OSError, TimeoutError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error) or "no answer"
        raise ConfigError(f"{setting} = {address}: no environment is reachable there ({why}); start it with "
                          f"`slipstream env serve MODULE:CLASS --port {port}`, or correct the address") from None
    writer.close()


async def importable(setting: str, entry: str, args: dict[str, object] | None = None) -> None:
    """Raises the ConfigError with which importing `entry` fails; `args` are those of an environment class."""
    more = [] if args is None else [json.dumps(args)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "slipstream.cli.preflight", setting, entry, *more,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        raise ConfigError(lines[-1] if lines else f"{setting} = {entry!r}: importing it ended the process")


def buffer_port(run: RunFile) -> None:
    """The buffer's address, when the run file fixes it, is free."""
    host, port = buffer_host_port(run)
    if port == 0:
        return
    setting = "service.buffer_address" if run.service.buffer_address else "service.buffer_port"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{setting}: port {port} on {host} cannot be bound ({error.strerror}): end what uses it, or "
                              "remove the setting to get a free one") from None


def buffer_host_port(run: RunFile) -> tuple[str, int]:
    """Where the run file wants the buffer; port 0 = anywhere."""
    if not run.service.buffer_address:
        return "127.0.0.1", run.service.buffer_port
    host, _, port = run.service.buffer_address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"service.buffer_address = {run.service.buffer_address!r} is not of the form host:port")
    return host, int(port)


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _import(setting: str, entry: str, args: str | None) -> None:
    """Child process of `importable`."""
    from slipstream.environment import load, named

    try:
        if args is not None:
            load(entry, json.loads(args), setting)
        elif not callable(named(entry, setting)):
            raise ConfigError(f"{setting} = {entry!r} is not callable; a scorer is a function of (answer, task)")
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    _import(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
