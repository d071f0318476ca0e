"""The reward service as a process of its own, against a buffer that a test scripts: leases, scores, heartbeats, the end."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from slipstream import rpc
from slipstream.errors import Fenced, to_status
from slipstream.protos.buffer.v1 import scores_pb2 as pb
from slipstream.protos.buffer.v1 import scores_pb2_grpc
from slipstream.protos.reward.v1 import reward_pb2, reward_pb2_grpc
from slipstream.protos.types.v1 import sample_pb2

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


class ScriptedBuffer(scores_pb2_grpc.ScoreServiceServicer):
    """Grants what a test puts in, keeps what comes back."""

    def __init__(self) -> None:
        self.unscored: list[pb.UnscoredSample] = []
        self.submits: list[list[tuple[int, float, str]]] = []
        self.beats: list[list[int]] = []
        self.lost: set[int] = set()
        self.changed = asyncio.Condition()
        self.ttl_s = 60.0

    async def put(self, scorer: str, responses: list[str], answer: str = "", first: int = 0) -> None:
        for i, response in enumerate(responses, first):
            lease = sample_pb2.Lease(
                sample=sample_pb2.SampleId(draw=sample_pb2.DrawId(ledger_epoch=1, number=i)), attempt=1)
            transcript = sample_pb2.Transcript(response=response, answer=answer, scorer=scorer).SerializeToString()
            self.unscored.append(pb.UnscoredSample(lease=lease, transcript=transcript))
        async with self.changed:
            self.changed.notify_all()

    async def until(self, predicate) -> None:
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(predicate)

    @property
    def scores(self) -> dict[int, tuple[float, str]]:
        return {draw: (scalar, failure) for submit in self.submits for draw, scalar, failure in submit}

    async def LeaseUnscored(self, request, context):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rpc.seconds(request.wait)), self.changed:
                await self.changed.wait_for(lambda: self.unscored)
        granted, self.unscored = self.unscored[:request.max_samples], self.unscored[request.max_samples:]
        return pb.LeaseUnscoredResponse(samples=granted, ttl=rpc.duration(self.ttl_s))

    async def SubmitScores(self, request, context):
        async with self.changed:
            self.submits.append([(s.lease.sample.draw.number, s.score.scalar, s.score.failure) for s in request.scores])
            self.changed.notify_all()
        return pb.SubmitScoresResponse(statuses=[to_status(None) for _ in request.scores])

    async def HeartbeatScoring(self, request, context):
        draws = [lease.sample.draw.number for lease in request.leases]
        async with self.changed:
            self.beats.append(draws)
            self.changed.notify_all()
        return pb.HeartbeatScoringResponse(
            statuses=[to_status(Fenced("re-granted") if d in self.lost else None) for d in draws])


@contextlib.asynccontextmanager
async def reward_process(folder: Path, buffer: str, **reward):
    """python -m services.reward, as the supervisor starts it."""
    environment = {"name": "e", "entry": "x:Y", "scorer": reward.pop("scorer", "")}
    run_file = folder / "run.json"
    run_file.write_text(json.dumps({
        "run": {"name": "t", "folder": str(folder / "run")}, "model": {"path": "unused"}, "environments": [environment],
        "reward": reward}))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.reward", "--run-file", str(run_file), "--instance", "reward-0", "--buffer", buffer,
        stderr=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(HERE)})
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.fixture
async def buffer():
    scripted = ScriptedBuffer()
    async with rpc.Server("127.0.0.1", 0, [
            (scores_pb2_grpc.add_ScoreServiceServicer_to_server, scripted)], grace_s=0) as server:
        scripted.address = server.address
        yield scripted


async def test_a_lot_is_leased_scored_and_submitted_in_one_call_each(buffer, tmp_path):
    """512 exact matches: one lease, one submit; SIGTERM then ends the idle process with exit code 0."""
    await buffer.put("exact", ["12" if i % 2 else "21" for i in range(512)], answer="12")
    async with reward_process(tmp_path, buffer.address) as process:
        await buffer.until(lambda: len(buffer.scores) == 512)
        assert len(buffer.submits) == 1
        assert buffer.scores == {i: (float(i % 2), "") for i in range(512)}
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_a_hanging_scorer_is_heartbeated_then_named_and_holds_back_nobody(buffer, tmp_path):
    """The rest is submitted at once; the hanging one's lease is kept alive until the time limit makes it a failure."""
    buffer.ttl_s = 1.0
    await buffer.put("scorer_cases:hangs_on_demand", ["hang" if i == 3 else "" for i in range(20)])
    async with reward_process(tmp_path, buffer.address, timeout_s=2.5, lease_s=1):
        await buffer.until(lambda: len(buffer.scores) == 19)
        await buffer.until(lambda: [3] in buffer.beats)
        await buffer.put("exact", ["x"], answer="x", first=20)
        await buffer.until(lambda: len(buffer.scores) == 21)
    scores = buffer.scores
    assert scores.pop(3) == (0.0, "timeout after 2.5 s") and set(scores.values()) == {(1.0, "")}


async def test_a_stop_finishes_what_is_in_hand(buffer, tmp_path):
    """SIGTERM while a scorer works: no new lease is taken, the score in progress is still handed in, exit code 0."""
    await buffer.put("scorer_cases:hangs_on_demand", ["hang"])
    async with reward_process(tmp_path, buffer.address, timeout_s=2) as process:
        await buffer.until(lambda: not buffer.unscored)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
    assert buffer.scores == {0: (0.0, "timeout after 2 s")}


async def test_a_lease_that_others_have_by_now_is_dropped(buffer, tmp_path):
    """A fenced heartbeat: the late score is not even sent."""
    buffer.ttl_s, buffer.lost = 0.4, {0}
    await buffer.put("scorer_cases:hangs_on_demand", ["hang", "quick"])
    async with reward_process(tmp_path, buffer.address, timeout_s=1.5, lease_s=0.4) as process:
        await buffer.until(lambda: any(0 in beat for beat in buffer.beats) and 1 in buffer.scores)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
    assert 0 not in buffer.scores


async def test_a_scorer_that_cannot_be_imported_is_one_line_and_exit_code_2(buffer, tmp_path):
    """The run file names it, so it is checked before the first lease."""
    async with reward_process(tmp_path, buffer.address, scorer="scorer_cases:lenght") as process:
        _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    lines = [line for line in stderr.decode().splitlines() if '"error"' in line]
    assert len(lines) == 1 and "environments.scorer = 'scorer_cases:lenght'" in lines[0] and "Traceback" not in stderr.decode()


async def test_scoring_as_a_plain_call(buffer, tmp_path):
    """RewardService: results in order; a failure is a score, an unknown scorer a status."""
    async with reward_process(tmp_path, buffer.address) as process:
        async with asyncio.timeout(20):
            while b'"serving"' not in (line := await process.stderr.readline()):
                assert line, "the process ended"
        async with rpc.channel(json.loads(line)["address"]) as channel:
            stub = reward_pb2_grpc.RewardServiceStub(channel)
            response = await rpc.call(stub.ScoreTranscripts, reward_pb2.ScoreTranscriptsRequest(transcripts=[
                sample_pb2.Transcript(scorer="numeric", response="it is 4", answer="4"),
                sample_pb2.Transcript(scorer="scorer_cases:raises"), sample_pb2.Transcript(scorer="nummeric")]), 20)
    good, bad, unknown = response.results
    assert good.score.scalar == 1 and bad.score.failure.startswith("exception: ZeroDivisionError")
    assert unknown.status.code == 5 and "did you mean 'numeric'?" in unknown.status.message
