"""The C kernel of decode attention (`one_query.c`): compiled on the machine that runs it, kept on disk, called from torch.

It takes a second to compile, once for each machine and version of the source; the library lies in torch's compile cache
(`TORCHINDUCTOR_CACHE_DIR`), by default in a folder of the user in /tmp. One thread: with more, torch's own products are faster.

Axes: B rows, H query heads, K key/value heads, L positions, D width of queries and keys, E width of values.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from slipstream.errors import ConfigError

SOURCE = Path(__file__).with_name("one_query.c")
COMPILERS = ("cc", "gcc", "clang")
COMPILE_S = 120.0
# Sums may be taken in any order, and masks are finite. Not -ffast-math: it changes how the whole process treats tiny numbers.
FLAGS = ("-O3", "-fPIC", "-shared", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-fassociative-math",
         "-fno-signed-zeros", "-ffinite-math-only")
NATIVE = ("-march=native", "-mprefer-vector-width=512") if platform.machine() in ("x86_64", "AMD64") else ("-mcpu=native",)


@functools.cache
def kernel() -> Callable[..., None]:
    """The compiled function. Raises ConfigError, naming what was looked for, without a compiler or a folder to keep it in."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise ConfigError(
            f"rollout.compile needs a C compiler, and none of {', '.join(COMPILERS)} is on PATH: install one (apt-get install "
            'g++), or set rollout.compile = "none"')
    key = hashlib.sha256(repr((SOURCE.read_bytes(), FLAGS, NATIVE, compiler, _processor())).encode()).hexdigest()[:16]
    library = _folder() / f"one_query-{key}.so"
    try:
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = library.parent.stat()
        if found.st_uid not in (0, os.getuid()) or stat.S_IMODE(found.st_mode) & 0o022:  # /tmp is everybody's
            raise ConfigError(
                f"rollout.compile: others may write to {library.parent}, and so choose what is run: chmod 700 it, or set "
                "TORCHINDUCTOR_CACHE_DIR to a folder of this user")
        if not library.exists():
            _compile(compiler, library)
        function = ctypes.CDLL(str(library)).one_query
    except OSError as error:  # a read-only folder, or one from which nothing may be run
        raise ConfigError(
            f"rollout.compile: {library.parent} cannot be used ({error}): set TORCHINDUCTOR_CACHE_DIR to a folder that this "
            'user may write to and run from, or rollout.compile = "none"') from error
    function.argtypes, function.restype = [ctypes.c_void_p] * 7 + [ctypes.c_float], None
    return function


def one_query(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float,
) -> torch.Tensor:
    """[B, H, 1, D] over keys [B, K, L, D] and values [B, K, L, E], with an additive mask [B, 1, 1, L]: [B, 1, H, E]. fp32."""
    (batch, heads, _, dim), (kinds, length, width) = query.shape, value.shape[1:]
    query = query.contiguous()
    out, weights = query.new_empty(batch, 1, heads, width), query.new_empty(2 * length)
    shape = (ctypes.c_int64 * 13)(
        batch, kinds, heads // kinds, length, dim, width, *key.stride()[:3], *value.stride()[:3], mask.stride(0))
    kernel()(
        ctypes.addressof(shape), query.data_ptr(), key.data_ptr(), value.data_ptr(), mask.data_ptr(), out.data_ptr(),
        weights.data_ptr(), scaling)
    return out


@torch.library.custom_op("slipstream::one_query", mutates_args=())
def one_query_op(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float,
) -> torch.Tensor:
    """The same as an operator, which a compiled graph calls without looking inside."""
    return one_query(query, key, value, mask, scaling)


@one_query_op.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])


def _folder() -> Path:
    """In torch's compile cache where that is named; importing its compiler, which knows the default, would take a second."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(named) / "slipstream" if named else Path(tempfile.gettempdir()) / f"slipstream-compiled-{os.getuid()}"


def _processor() -> str:
    """What tells machines with different instructions apart: a library made for one may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [compiler, *FLAGS, *NATIVE, str(SOURCE), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S)
            failed = done.stderr.strip() if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            failed = str(error)
        if failed:
            raise ConfigError(
                f"rollout.compile: {compiler} cannot compile {SOURCE.name}: {' '.join(failed.split())[:300]}; set "
                'rollout.compile = "none"')
        made.replace(library)
