"""The model that a run leaves in its folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.trainer.learner import Learner


def save(learner: Learner, folder: Path) -> None:
    """Beside, then renamed: whoever looks sees a whole model or the former one."""
    fresh, former = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for leftover in (fresh, former):
        shutil.rmtree(leftover, ignore_errors=True)
    learner.save_pretrained(fresh)
    if folder.exists():
        folder.rename(former)
    fresh.rename(folder)
    shutil.rmtree(former, ignore_errors=True)
