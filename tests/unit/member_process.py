"""A member of an engine over several nodes whose part of the engine is a file and a sleeping child. Started by test_group."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.rollout.member import run
from slipstream.manifest import RawTensor
from slipstream.ranges import checksum
from slipstream.service import ServiceContext


class FilePart:
    """Versions as their bytes, one after the other, in a folder of this node's own. `<folder>/spoil` spoils the next file; the
    child is `<folder>/engine.json`'s pid."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._launched = folder, asyncio.Event()
        self._child: asyncio.subprocess.Process | None = None

    def write(self, files: Mapping[str, bytes], tensors: Sequence[RawTensor], folder: Path, name: str) -> int:
        data = b"".join(bytes(t.data) for t in tensors)
        if files:
            (self._folder / "files.json").write_text(json.dumps([str(folder), *sorted(files)]))
        if (spoil := self._folder / "spoil").exists():
            spoil.unlink()
            data = data[:-1] + bytes([data[-1] ^ 1])
        (self._folder / name).write_bytes(data)
        return checksum(data)

    async def launch(self, node: int, address: str, port: int) -> None:
        self._child = await asyncio.create_subprocess_exec("sleep", "600")
        (self._folder / "engine.json").write_text(json.dumps({"node": node, "at": f"{address}:{port}", "pid": self._child.pid}))
        self._launched.set()

    async def ended(self) -> None:
        await self._launched.wait()
        assert self._child is not None
        await self._child.wait()

    def forget(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    async def stop(self) -> None:
        if self._child is not None and self._child.returncode is None:
            self._child.kill()


def part(context: ServiceContext) -> FilePart:
    folder = context.run.folder.parent / context.arguments.instance
    folder.mkdir(exist_ok=True)
    return FilePart(folder)


if __name__ == "__main__":
    run(part, sys.argv[1:])
