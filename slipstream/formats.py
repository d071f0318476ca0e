"""Formats of what outlives a process. One release writes, another reads: each has a number, an unknown one is refused by name.

| what                             | number                     | a reader that does not know it                          |
|----------------------------------|----------------------------|---------------------------------------------------------|
| calls between services           | packages `…v1`             | `tools/check_release.py` refuses what would break one    |
| run file                         | its hash, settings by name | the buffer refuses a worker with other settings          |
| ledger in Redis                  | services.buffer.ledger.SCHEMA | a front refuses to serve, or stops serving            |
| manifest of a policy version     | slipstream.manifest.FORMAT | the version is not loaded, the old one serves on         |
| manifest of a checkpoint         | services.trainer.checkpoint.FORMAT | the trainer does not start                       |
| batch log                        | MAGIC                      | `is damaged`, which is an error for every reader         |
| run folder of a supervisor       | RUN_FOLDER, release.json   | `slipstream run` refuses to resume                       |

A field that is added later is absent in what an older release wrote: readers give it a default, and the number stays. It grows
when an older reader would be wrong. A reader knows its own number and, where a note in docs/releases says so, older ones.
"""

from __future__ import annotations

import json
from pathlib import Path

from slipstream import __version__
from slipstream.errors import ConfigError, InvalidInput

RUN_FOLDER = 1
NOTES = "docs/releases"  # one note a release: what changes for who upgrades, and the way there


def known(what: str, number: object, newest: int, oldest: int = 0) -> None:
    """Raise InvalidInput (FORMAT) unless `what` is of a format from `oldest` (0 = the newest alone) to `newest`."""
    oldest = oldest or newest
    if isinstance(number, int) and oldest <= number <= newest:
        return
    reads = f"format {newest}" if oldest == newest else f"formats {oldest} to {newest}"
    remedy = "a newer release wrote it: use that one, or a newer one" if isinstance(number, int) and number > newest else (
        f"an older release wrote it: go on with that one, or see {NOTES}")
    raise InvalidInput(
        f"{what} has format {number}, release {__version__} reads {reads}; {remedy}", "FORMAT", format=number, newest=newest)


def check_folder(folder: Path) -> None:
    """Raise ConfigError for a run folder of a format that is not known. One without a number is of the first."""
    path = folder / "release.json"
    if not path.exists():
        return
    try:
        known(f"run folder {folder}", json.loads(path.read_text()).get("format"), RUN_FOLDER)
    except (ValueError, AttributeError):
        raise ConfigError(f"{path} is damaged: delete it when release {__version__} wrote this folder") from None
    except InvalidInput as error:
        raise ConfigError(error.message, error.reason) from None


def stamp_folder(folder: Path) -> None:
    """Write number and release into a run folder that was checked: <folder>/release.json."""
    path = folder / "release.json"
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps({"format": RUN_FOLDER, "release": __version__}))
    temporary.replace(path)
