"""What a rank reads by itself: the routes of its own rows, most of what there is to read; and what rank 0 sends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel import ranks, read_cases


@pytest.mark.slow
@pytest.mark.nightly
def test_each_rank_reads_the_routes_of_its_own_rows_and_no_others(tmp_path: Path) -> None:
    """Every row on one rank, with its own routes; every byte range read once, by the rank that trains the row."""
    found = ranks.run(2, read_cases.shared, str(tmp_path), False)
    for rank in found:
        assert rank["rows"] and rank["right"] == rank["rows"]
        assert len(rank["read"]) == len(rank["rows"])
    assert not set(found[0]["rows"]) & set(found[1]["rows"])
    assert not set(found[0]["read"]) & set(found[1]["read"])
    assert sum(len(rank["rows"]) for rank in found) == 20


@pytest.mark.slow
@pytest.mark.nightly
def test_routes_that_are_not_those_recorded_end_the_step_on_every_rank(tmp_path: Path) -> None:
    """One rank reads them; both are told, by draw and sample, so that none waits for the other."""
    found = ranks.run(2, read_cases.shared, str(tmp_path), True)
    assert found[0] == found[1]
    assert "draw 4, sample 3, segment 0: the routes in routes/all are not those" in found[0]["told"]


def test_what_rank_0_sends_of_a_token_is_small_beside_its_routes() -> None:
    """docs/decisions/0013: 32 bytes of a token, 416 with the routes of 48 layers of 8 experts."""
    found = read_cases.bytes_per_token()
    assert found["plain"] < 36 and found["with routes"] > 10 * found["plain"]
