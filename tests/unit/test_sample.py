"""Samples on the wire: exact round trips, and nothing malformed gets past the boundary."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import sample as s
from slipstream.errors import InvalidInput
from slipstream.protos.types.v1 import sample_pb2


def make(prompt=5, answer=3, **changes) -> s.Segment:
    """A well-formed segment."""
    values = dict(
        tokens=np.arange(prompt + answer, dtype=np.int32),
        loss_mask=np.arange(prompt + answer) >= prompt,
        logprobs=np.full(answer, -0.5, np.float32),
        spans=(s.Span(9, 7, 1, answer),),
    )
    return s.Segment(**{**values, **changes})


@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=40), min_size=1, max_size=4),
    routes=st.booleans(),
)
def test_round_trip_is_exact(masks, routes):
    """Any segments, any mask pattern, with and without routes, come back bit for bit."""
    segments = []
    for i, mask in enumerate(masks):
        m = np.array(mask)
        n = int(m.sum())
        segments.append(
            s.Segment(
                np.arange(len(m), dtype=np.int32),
                m,
                -np.linspace(0, 1, n, dtype=np.float32),
                (s.Span(3, 2, 1, n),) if n else (),
                np.ones((len(m) - 1, 2, 2), np.uint8) if routes else None,
                parent=0 if i else None,
                fork_point=i,
            )
        )
    back = s.decode(s.encode(s.Sample(segments, s.FINISH_LENGTH, '{"a":1}')))
    assert (back.finish_reason, back.info_json) == (s.FINISH_LENGTH, '{"a":1}')
    for one, two in zip(segments, back.segments, strict=True):
        assert np.array_equal(one.tokens, two.tokens) and np.array_equal(one.loss_mask, two.loss_mask)
        assert one.logprobs.tobytes() == two.logprobs.tobytes() and one.spans == two.spans
        assert (one.parent, one.fork_point) == (two.parent, two.fork_point)
        assert (two.routes is None) != routes and (not routes or np.array_equal(one.routes, two.routes))


def test_run_lengths_start_with_context():
    """A prompt of 5 and an answer of 3 is [5, 3]; a segment that starts generated begins with 0."""
    wire = sample_pb2.SampleBody.FromString(s.encode(s.Sample([make(5, 3), make(0, 2)])))
    assert list(wire.segments[0].loss_mask_runs) == [5, 3]
    assert list(wire.segments[1].loss_mask_runs) == [0, 2]


@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        ([], "NO_SEGMENTS"),
        ([make(tokens=np.zeros(0, np.int32), loss_mask=np.zeros(0, bool))], "EMPTY_TOKENS"),
        ([make(answer=0, spans=())], "NO_GENERATED_TOKENS"),
        ([make(logprobs=np.array([-1, np.nan, -1], np.float32))], "NON_FINITE_LOGPROB"),
        ([make(logprobs=np.array([-1, -np.inf, -1], np.float32))], "NON_FINITE_LOGPROB"),
        ([make(logprobs=np.array([-1, 0.5, -1], np.float32))], "POSITIVE_LOGPROB"),
        ([make(logprobs=np.array([-1, -1], np.float32))], "LENGTH_MISMATCH"),
        ([make(loss_mask=np.ones(4, bool))], "LENGTH_MISMATCH"),
        ([make(routes=np.zeros((8, 2, 2), np.uint8))], "LENGTH_MISMATCH"),
        ([make(spans=(s.Span(9, 7, 1, 2),))], "VERSION_SPAN"),
        ([make(parent=0)], "PARENT"),
    ],
)
def test_malformed_samples_are_refused_by_reason(segments, reason):
    """Each fault has its own counted reason and names the field."""
    with pytest.raises(InvalidInput) as caught:
        s.validate(s.Sample(segments))
    assert caught.value.reason == reason and caught.value.metadata["field"]


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_crash(data):
    """Whatever arrives is a sample or an InvalidInput, never another exception."""
    try:
        s.validate(s.decode(data))
    except InvalidInput as error:
        assert error.reason


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scores_must_be_finite(bad):
    """In the scalar, in a turn, in a component, in a per-token tensor."""
    per_token = s.tensor(np.array([bad], np.float32))
    for score in (
        sample_pb2.Score(scalar=bad),
        sample_pb2.Score(per_turn=[0, bad]),
        sample_pb2.Score(components={"a": bad}),
        sample_pb2.Score(per_token=per_token),
    ):
        with pytest.raises(InvalidInput, match="not finite|NaN"):
            s.validate_score(score)
    s.validate_score(sample_pb2.Score(scalar=1, per_turn=[0.5]))
