"""What DeepEP and NCCL need on an EFA instance: the environment by instance type, and whether the machine has the rest.

    python -m services.trainer.parallel.fabric --instance-type p5en.48xlarge [--transport gda|proxy] [--check]

prints `NAME=value` lines for the trainer's pods; with --check, what is missing here and what to do, and exit code 1 if
anything is.

Two transports carry the GPU-initiated networking of DeepEP V2 over EFA. `gda`: the GPU rings the adapter's doorbell itself;
on p5en, p6-b200 and p6-b300 only, and only with the EFA variant of DeepEP, because upstream's kernel expects ordered arrival,
which EFA does not give. `proxy`: a CPU thread does; everywhere, slower for small messages. Sources:
docs/guides/expert-parallelism.md.

Not yet run on such a machine.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.errors import ConfigError

Transport = Literal["gda", "proxy"]
PLUGIN = "opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so"


@dataclass(frozen=True, slots=True)
class Instance:
    """A whole node: its NVLink domain."""

    gpus: int
    gpu_gib: int
    adapters: int  # vpc.amazonaws.com/efa
    fast_gb_s: float  # NVLink, GB/s each way and GPU
    slow_gb_s: float  # EFA, GB/s each way and GPU
    gda: bool


INSTANCES = {
    "p5.48xlarge": Instance(8, 80, 32, 450, 50, False),
    "p5e.48xlarge": Instance(8, 141, 32, 450, 50, False),
    "p5en.48xlarge": Instance(8, 141, 16, 450, 50, True),
    "p6-b200.48xlarge": Instance(8, 180, 8, 900, 50, True),
    "p6-b300.48xlarge": Instance(8, 275, 16, 900, 100, True),
}


def instance(kind: str) -> Instance:
    """By its name. Raises ConfigError for one that DeepEP does not run on, or that is unknown."""
    if kind.startswith(("p4d", "p4de")):
        raise ConfigError(f"trainer.parallel.instance_type = {kind!r}: DeepEP V2 needs SM90; set exchange = hierarchical")
    if (found := INSTANCES.get(kind)) is None:
        raise ConfigError(f"trainer.parallel.instance_type = {kind!r} is none of {', '.join(INSTANCES)}")
    return found


def preset(kind: str, transport: Transport | None = None) -> dict[str, str]:
    """The environment of every trainer process. `transport` None: the best that the instance has. Raises ConfigError."""
    found = instance(kind)
    transport = transport or ("gda" if found.gda else "proxy")
    if transport == "gda" and not found.gda:
        able = ", ".join(name for name, one in INSTANCES.items() if one.gda)
        raise ConfigError(f"trainer.parallel.transport = 'gda' on {kind}: only {able} have it; set proxy")
    common = {
        "FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "NCCL_NET_PLUGIN": "ofi", "NCCL_GIN_PLUGIN": f"/{PLUGIN}",
        "NCCL_SOCKET_IFNAME": "^docker,lo,veth"}
    if kind.startswith("p6-b300"):
        common["NCCL_IB_HCA"] = "rdmap"  # two of its devices are no EFA
    if transport == "gda":
        return common | {"NCCL_GIN_TYPE": "5", "NCCL_SYM_GIN_KERNELS_ENABLE": "0", "EP_HYBRID_KERNEL": "unordered"}
    return common | {
        "NCCL_GIN_TYPE": "2", "NCCL_GIN_ENABLE": "1", "NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0",
        "OFI_NCCL_PROTOCOL": "RDMA", "OFI_NCCL_GIN_MAX_REQUESTS": "512"}


def missing(
    kind: str, transport: Transport | None, environment: Mapping[str, str], root: Path = Path("/"),
    nccl: tuple[int, int, int] | None = None,
) -> list[str]:
    """What this machine lacks, each with its remedy. `nccl`: version of the library at run time; None = not looked at."""
    expected = preset(kind, transport)
    gda = expected["NCCL_GIN_TYPE"] == "5"
    found = [
        f"{name} is {environment.get(name) or 'not set'}; set {name}={value}"
        for name, value in expected.items() if environment.get(name) != value]
    adapters = len(list((root / "sys/class/infiniband").glob("*"))) if (root / "sys/class/infiniband").exists() else 0
    if adapters < instance(kind).adapters:
        found.append(
            f"{adapters} of {instance(kind).adapters} EFA adapters are visible; request vpc.amazonaws.com/efa: "
            f"{instance(kind).adapters} in the pod")
    if not (root / "dev/gdrdrv").exists():
        found.append("/dev/gdrdrv is missing; load gdrdrv (GDRCopy 2.5) on the host and pass the device to the pod")
    least = (2, 31, 2) if gda else (2, 30, 4)
    if nccl is not None and nccl < least:
        found.append(f"NCCL is {_dotted(nccl)}; install {_dotted(least)} or later in the image, and no other libnccl beside it")
    found += _plugin(root, gda)
    return found + (_gda_host(root) if gda else [])


def _plugin(root: Path, gda: bool) -> list[str]:
    path = root / PLUGIN
    if not path.exists():
        return [f"/{PLUGIN} is missing; run the EFA installer 1.50 in the image with --skip-kmod"]
    if gda and b"ncclGinPlugin_v14" not in path.read_bytes():
        return [f"/{PLUGIN} has no ncclGinPlugin_v14; the EFA installer 1.50 (aws-ofi-nccl 1.21.1) brings one that has"]
    return []


def _gda_host(root: Path) -> list[str]:
    """What GPU-initiated EFA asks of the host."""
    found = []
    version = root / "sys/module/efa/version"
    number = re.match(r"(\d+)\.(\d+)", version.read_text()) if version.exists() else None
    if number is None or (int(number[1]), int(number[2])) < (3, 3):
        told = version.read_text().strip() if version.exists() else "not loaded"
        found.append(f"the host's efa driver is {told}; install 3.3.0 or later on the host, or set transport = proxy")
    params = root / "proc/driver/nvidia/params"
    if not params.exists() or "PeerMappingOverride=1" not in params.read_text():
        found.append("the NVIDIA driver runs without PeerMappingOverride=1; add it to NVreg_RegistryDwords on the host")
    return found


def nccl_version() -> tuple[int, int, int] | None:
    """Of the libnccl that a process here would load; None when there is none."""
    try:
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))


def main(arguments: list[str]) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m services.trainer.parallel.fabric", description="EFA presets.")
    parser.add_argument("--instance-type", required=True, help=", ".join(INSTANCES))
    parser.add_argument("--transport", choices=("gda", "proxy"), help="default: gda where the instance has it")
    parser.add_argument("--check", action="store_true", help="say what is missing on this machine")
    given = parser.parse_args(arguments)
    try:
        if given.check:
            found = missing(given.instance_type, given.transport, os.environ, nccl=nccl_version())
            print("\n".join(found) or "nothing is missing")
            return int(bool(found))
        print("\n".join(f"{name}={value}" for name, value in preset(given.instance_type, given.transport).items()))
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
