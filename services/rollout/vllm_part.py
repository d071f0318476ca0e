"""vLLM's engines on a node behind the leader: checkpoints at the leader's paths, and a headless vLLM in a process of its own.

Written against vLLM 0.32's own definitions (`vllm serve --headless`); engines over several nodes have not yet run on a GPU.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.rollout import vllm_arguments
from services.rollout.vllm_checkpoint import Checkpoints
from services.rollout.vllm_process import SHUTDOWN_S
from slipstream.config import RunFile
from slipstream.errors import Unavailable
from slipstream.manifest import RawTensor

EXTENSION = "services.rollout.vllm_worker.WorkerExtension"


class VllmPart:
    """See services.rollout.member.Part."""

    def __init__(self, run: RunFile) -> None:
        self._run = run
        self._checkpoints: Checkpoints | None = None
        self._shape: Mapping[str, object] = {}
        self._paths: dict[str, str] = {}
        self._launched = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    def write(self, files: Mapping[str, bytes], tensors: Sequence[RawTensor], folder: Path, name: str) -> int:
        if self._checkpoints is None or self._checkpoints.folder != folder:
            if self._checkpoints is not None:
                self._checkpoints.close()
            self._checkpoints, self._paths = Checkpoints(files, sum(t.size for t in tensors), folder=folder), {}
            shape = json.loads(files["config.json"])
            self._shape = shape.get("text_config", shape)
        path, crc32c = self._checkpoints.write(tensors, name)
        if not self._paths:
            self._checkpoints.become(path)
        self._paths[name] = path
        return crc32c

    async def launch(self, node: int, address: str, port: int) -> None:
        assert self._checkpoints is not None
        from vllm.platforms import current_platform

        cpu = current_platform.is_cpu()
        arguments = vllm_arguments.engine_arguments(
            self._run, str(self._checkpoints.folder), self._shape, EXTENSION, cpu) | vllm_arguments.node_arguments(
            self._run, node, address, port)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.rollout.vllm_headless", json.dumps(arguments),
                env=os.environ | vllm_arguments.environment(self._run, cpu))
        except OSError as error:
            raise Unavailable(f"vLLM did not start: {error.strerror}", "ENGINE_START") from error
        self._launched.set()

    async def ended(self) -> None:
        await self._launched.wait()
        assert self._process is not None
        await self._process.wait()

    def forget(self, name: str) -> None:
        if self._checkpoints is not None and (path := self._paths.pop(name, "")):
            self._checkpoints.drop(path)

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), SHUTDOWN_S)
            except TimeoutError:
                self._process.kill()
        if self._checkpoints is not None:
            await asyncio.to_thread(self._checkpoints.close)
