"""`--dry-run`: the resolved run file, everything that cannot work, and what a start would make of the run folder.

Standard output is TOML, the verdict a comment at its end; what cannot work goes to standard error, one line each, and then the
settings are left out.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

from slipstream.cli import preflight, run_start
from slipstream.cli.run_folder import RunFolder
from slipstream.cli.toml_text import dumps
from slipstream.config import RunFile
from slipstream.errors import ConfigError


def run(settings: RunFile, fresh: bool) -> int:
    """Of `slipstream run`; 2 when something cannot work."""
    return _tell(settings, fresh, preflight.problems)


def sft(settings: RunFile, fresh: bool) -> int:
    """Of `slipstream sft`; 2 when something cannot work."""
    return _tell(settings, fresh, preflight.problems_of_sft)


def _tell(settings: RunFile, fresh: bool, look: Callable[[RunFile], Awaitable[list[str]]]) -> int:
    async def looked() -> list[str]:
        return await look(settings)

    found, folder, start = asyncio.run(looked()), RunFolder(settings.folder), None
    try:
        run_start.free(folder)
        start = run_start.start(folder, settings, fresh)
    except ConfigError as error:
        found.append(error.message)
    if not found:
        print(dumps(settings.model_dump(mode="json")), end="", flush=True)
    for problem in found:
        print(f"slipstream: {problem}", file=sys.stderr)
    verdict = f"{len(found)} things speak" if len(found) > 1 else "one thing speaks" if found else "nothing speaks"
    print(f"# {verdict} against a start" + (f": {start.value}, in {folder.path}" if start and not found else ""), flush=True)
    return 2 if found else 0
