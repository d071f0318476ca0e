"""`--stay`: on a cluster what exits is started again, so a finished trainer and its ranks serve on until told to stop."""

from __future__ import annotations

import dataclasses

import pytest

from services.trainer.parallel import conductor, launch
from slipstream import config
from slipstream.lifecycle import Lifecycle, SystemClock


async def test_a_finished_process_that_stays_stops_only_when_asked() -> None:
    """On a cluster what exits is started again: a finished trainer stays until somebody stops it, then with exit code 0."""
    lifecycle = Lifecycle(SystemClock())
    lifecycle.stay = True
    lifecycle.finish()
    assert lifecycle.finished and not lifecycle.stopping.is_set()
    lifecycle.request_stop("SIGTERM")
    assert await lifecycle.run() == 0


@pytest.mark.parametrize(("stay", "code", "waits"), [(True, 0, 1), (False, 0, 0), (True, 1, 0)])
def test_finished_ranks_stay_with_their_trainer(
    monkeypatch: pytest.MonkeyPatch, stay: bool, code: int, waits: int,
) -> None:
    """A pod of ranks that ends is started again, with its whole group: with `--stay` they wait, unless they failed."""
    paused: list[int] = []
    monkeypatch.setattr(conductor, "follow", lambda run: code)
    monkeypatch.setattr(launch.signal, "pause", lambda: paused.append(1))
    monkeypatch.setenv("RANK", "1")
    words = ["trainer", "--run-file", "examples/sort-digits/run.toml", "--buffer", "localhost:1"]
    monkeypatch.setattr("sys.argv", [*words, "--stay"] if stay else words)
    run = config.load("examples/sort-digits/run.toml", ["trainer.parallel.ranks=2", "trainer.parallel.experts=2"])
    given = launch.arguments("trainer")
    monkeypatch.setattr(launch, "arguments", lambda service: dataclasses.replace(given, run=run))
    with pytest.raises(SystemExit) as ended:
        launch.divide()
    assert ended.value.code == code and len(paused) == waits
