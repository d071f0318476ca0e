"""A resumed trainer and its workers: who waits for whom."""

from __future__ import annotations

from pathlib import Path

from tests.fake_buffer import FakeBuffer
from tests.trainer_samples import run_file
from tests.unit.test_trainer_loop import train


async def test_a_resume_publishes_before_it_waits_for_a_batch(tmp_path: Path) -> None:
    """Workers that have just started need weights before they can finish a sample, so no batch exists until there is a version
    of this incarnation. A trainer that asked for its batch first would wait for ever."""
    buffer = FakeBuffer(steps=4)
    buffer.gate = lambda batch: "" if _published(buffer) else "rollouts, which wait for weights"
    assert await train(buffer, run_file(tmp_path, run={"steps": 2})) == 0
    assert await train(buffer, run_file(tmp_path)) == 0
    kinds = [event[0] for event in buffer.kinds("incarnation", "publish", "lease")]
    second = kinds[kinds.index("incarnation", 1):]
    assert second == ["incarnation", "publish", "lease", "lease", "publish", "publish"] or second == [
        "incarnation", "publish", "lease", "publish", "lease", "publish"]


def _published(buffer: FakeBuffer) -> bool:
    return any(event[2].incarnation == buffer.incarnation for event in buffer.kinds("publish"))
