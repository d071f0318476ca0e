"""The command line of a service process, and the environment that its launcher gives it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import RunFile, load
from slipstream.errors import ConfigError

SERVICES = ("buffer", "rollout", "reward", "trainer")
WEIGHTS = "weights"  # the optional weight server: a process like those, in the buffer's role


@dataclass(frozen=True, slots=True)
class ServiceArguments:
    """The command line of a service process."""

    run: RunFile
    service: str
    instance: str
    buffer: str  # host:port of the buffer; "" for the buffer itself
    host: str = "127.0.0.1"
    port: int = 0
    metrics_port: int = 0
    redis: str = ""
    run_file: Path = Path()
    client_port: int = 0
    health_port: int = 0
    tls_dir: str = ""
    secret_file: str = ""
    stay: bool = False


def arguments(service: str, argv: Sequence[str] | None = None) -> ServiceArguments:
    """Read the command line. Raises ConfigError; argparse exits with 2 for an unknown option."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{service}", description=f"The {service} service of Slipstream.")
    parser.add_argument("--run-file", type=Path, required=True, help="resolved run file, .json or .toml")
    parser.add_argument("--instance", default=f"{service}-0", help="name of this process within the run")
    parser.add_argument("--buffer", default="", help="host:port of the buffer")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="gRPC port; 0 = a free one")
    parser.add_argument("--metrics-port", type=int, default=0, help="Prometheus port; 0 = a free one")
    parser.add_argument(
        "--client-port", type=int, default=0, help="port for outside clients: TLS without a certificate, with a signed token")
    parser.add_argument("--health-port", type=int, default=0, help="plaintext port with health alone, for probes")
    parser.add_argument("--tls-dir", default="", help="folder of certificates; default: security.tls_dir of the run file")
    parser.add_argument("--secret-file", default="", help="secrets of tokens; default: security.secret_file of the run file")
    if service == "buffer":
        parser.add_argument("--redis", default="", help="Redis URL; default: buffer.redis of the run file")
        parser.add_argument("--redis-file", type=Path, help="file with the Redis URL, password and all; wins over --redis")
    parser.add_argument("--stay", action="store_true", help="serve on when the run is finished: something restarts what exits")
    found = parser.parse_args(argv)
    run = load(found.run_file)
    for option, port in (("--port", found.port), ("--metrics-port", found.metrics_port)):
        if not 0 <= port < 65536:
            raise ConfigError(f"{option} {port} is not a port: choose 1 to 65535, or 0 for a free one")
    for option, port in (("--client-port", found.client_port), ("--health-port", found.health_port)):
        if not 0 <= port < 65536:
            raise ConfigError(f"{option} {port} is not a port: choose 1 to 65535, or 0 for none")
    alone = service in ("buffer", WEIGHTS)
    buffer = "" if alone else found.buffer or run.service.buffer_address
    if not alone and not buffer:
        raise ConfigError(f"{service} needs the buffer's address: pass --buffer HOST:PORT or set service.buffer_address")
    redis = _redis_url(found, run) if service == "buffer" else ""
    return ServiceArguments(
        run, service, found.instance, buffer, found.host, found.port, found.metrics_port, redis, found.run_file,
        found.client_port, found.health_port, found.tls_dir, found.secret_file, found.stay)


def _redis_url(found: argparse.Namespace, run: RunFile) -> str:
    """The buffer's Redis: a file, where a password is not in every list of processes, the option, or the run file."""
    if found.redis_file is None:
        return found.redis or run.buffer.redis
    try:
        url = found.redis_file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"--redis-file {found.redis_file} cannot be read: {error.strerror}") from None
    if not url:
        raise ConfigError(f"--redis-file {found.redis_file} is empty: write redis://USER:PASSWORD@HOST:PORT/0 into it")
    return url


def launch_environment(threads: int = 1) -> dict[str, str]:
    """Variables that a launcher adds for a service process; they only work from the start of the process.

    malloc: large buffers are reused instead of being mapped and page-faulted anew each time. threads: CPU threads of numeric
    libraries, 0 = all; without a bound every process of a run would start one per core.
    """
    variables = {
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32), "TOKENIZERS_PARALLELISM": "false"}
    if threads:
        variables |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return variables
