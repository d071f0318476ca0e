"""Hop 3: a reward worker leases what nobody has scored yet. It sees transcripts, never tokens."""

from __future__ import annotations

from google.rpc import code_pb2

from slipstream.protos.buffer.v1.scores_pb2 import ScoredSample
from slipstream.protos.types.v1.sample_pb2 import Score, Transcript
from tests.walk.hops import Walk, lease, roll_out, score


async def test_scores_are_what_the_scorer_says(walk: Walk) -> None:
    """`exact` compares the response with the right answer. Every sample without a score is leased once, and once all have one
    there is nothing left to lease."""
    samples = await roll_out(walk, await lease(walk))
    await walk.buffer.submit(*samples)
    scored = await score(walk)
    assert len(scored) == sum(not s.HasField("score") for s in samples)
    assert {s.scalar for _, s in scored} == {0, 1}
    assert all(s == Score(scalar=t.response == t.answer) for t, s in scored)
    assert await walk.buffer.lease_unscored(wait_s=0) == []
    balance = await walk.buffer.front.ledger.balance()
    assert (balance.samples["scored"], balance.groups["complete"]) == (32, 8)


async def test_a_scorer_that_fails_is_data(walk: Walk) -> None:
    """A misspelt scorer, a crash, a time limit: the sample gets the score 0 with the reason, and its group does not wait."""
    samples = await roll_out(walk, await lease(walk))
    for submitted in samples:
        if submitted.transcript:
            transcript = Transcript.FromString(submitted.transcript)
            transcript.scorer = "exacd"
            submitted.transcript = transcript.SerializeToString()
    await walk.buffer.submit(*samples)
    reason = "unknown scorer 'exacd'; did you mean 'exact'?, or \"module:function\""
    assert {s.failure for _, s in await score(walk)} == {reason}
    batch = (await walk.buffer.batch(1)).batch
    assert {m.score.failure for g in batch.groups for m in g.members if not m.score.components} == {reason}
    assert sum(m.score.scalar for g in batch.groups for m in g.members) == 0


async def test_a_score_that_is_no_number_is_refused_alone(walk: Walk) -> None:
    """Bad input is sorted out at the boundary, item by item: a NaN never reaches a gradient, and the good score beside it is
    stored."""
    await walk.buffer.submit(*await roll_out(walk, await lease(walk)))
    bad, good = await walk.buffer.lease_unscored(2)
    refused, stored = await walk.buffer.submit_scores([
        ScoredSample(lease=bad.lease, score=Score(scalar=float("nan"))), ScoredSample(lease=good.lease, score=Score(scalar=1))])
    assert (refused.code, stored.code) == (code_pb2.INVALID_ARGUMENT, code_pb2.OK)
    assert "scalar = nan is not finite" in refused.message
