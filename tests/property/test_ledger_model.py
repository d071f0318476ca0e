"""The Redis ledger equals the readable in-memory model, transition for transition, under random programs with crashes.

Two fronts take turns on one Redis. After every operation model and Redis must have given the same answer and hold the same
contents, and these must add up (`ledger_sums`). Operations and faults: `ledger_programs`.
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.buffer.transitions import GROUP_EDGES, SAMPLE_EDGES
from tests.property.ledger_programs import RULES, Step, fixed_program, play, programs
from tests.property.ledger_world import Pair
from tests.redis_server import RedisProcess

pytestmark = pytest.mark.slow

QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
SCHEDULES = st.sampled_from(sorted(RULES))
TOUR = [("again", 11), ("lag", 16), ("free", 10), ("deadlines", 4), ("again", 25)]
NOT_BUILT = {"eg:batched>dropped", "eg:complete>evaluated", "eg:short>evaluated"}  # evaluation draws; nothing drops a batch yet
REASONS = ("failed", "timeout", "lag", "no_signal", "requeued", "ledger lost")


@settings(max_examples=25, deadline=None, suppress_health_check=QUIET)
@given(program=programs("reply front"), rules=SCHEDULES)
def test_redis_equals_the_model(server: RedisProcess, program: list[Step], rules: str) -> None:
    """Any program, with fronts that die before an operation or between it and its reply."""
    asyncio.run(run(server, program, rules))


def test_every_edge_is_taken(server: RedisProcess) -> None:
    """A few fixed programs go through every edge of both state machines, and drop groups for every reason, equal in Redis."""
    edges = {f"es:{old}>{new}" for old, news in SAMPLE_EDGES.items() for new in news}
    edges |= {f"eg:{old}>{new}" for old, news in GROUP_EDGES.items() for new in news}
    taken = set().union(*(asyncio.run(run(server, fixed_program(seed, 90), rules)) for rules, seed in TOUR))
    assert edges - taken == NOT_BUILT, "look for other seeds of TOUR"
    assert {name for name in taken if name.startswith("x:")} == {f"x:{reason}" for reason in REASONS}


@settings(max_examples=6, deadline=None, suppress_health_check=QUIET)
@given(program=programs("redis reply", most=24), rules=SCHEDULES)
def test_redis_equals_the_model_over_its_own_deaths(server: RedisProcess, program: list[Step], rules: str) -> None:
    """SIGKILL of Redis between any two operations: the append-only file holds everything that was answered."""
    asyncio.run(run(server, program, rules))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=QUIET)
@given(program=programs("reply front"), rules=SCHEDULES)
def test_redis_equals_the_model_in_many_programs(server: RedisProcess, program: list[Step], rules: str) -> None:
    """The same, longer."""
    asyncio.run(run(server, program, rules))


async def run(server: RedisProcess, program: list[Step], rules: str) -> set[str]:
    """Play it on both; the counters of edges and drops that moved."""
    pair = Pair(server, RULES[rules])
    try:
        await play(pair, program)
    finally:
        await pair.close()
    return pair.taken
