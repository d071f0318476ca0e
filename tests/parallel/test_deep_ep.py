"""The DeepEP adapter on a stand-in of the library that is strict where the library hangs: see stand_in/deep_ep."""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from services.trainer.parallel import deep_ep_checks as checks
from services.trainer.parallel.deep_ep_checks import Demand, buffer_bytes, problems
from tests.parallel import deep_ep_cases, ranks
from tests.parallel.adapter_faults import FAULTS

ADAPTER = Path(__file__).parents[2] / "services/trainer/parallel/deep_ep.py"
SIGNATURES = Path(__file__).parent / "stand_in" / "signatures.json"
GOOD = Demand(experts=128, top_k=8, hidden=2048, ranks=16, ranks_per_node=8)


@cache
def results(size: int, nvlink: int) -> list[dict[str, str]]:
    width = str(nvlink)
    return ranks.run(size, deep_ep_cases.contract, EP_STAND_IN_NVLINK_RANKS=width, RANKS_PER_NODE=width)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "nvlink"), [
    pytest.param(1, 8, marks=pytest.mark.nightly), pytest.param(2, 1, marks=pytest.mark.nightly), (4, 2)])
def test_adapter_keeps_the_contract(size: int, nvlink: int) -> None:
    """The suite of every exchange, bit for bit, and rounds, padded hidden sizes, zero-token ranks, destroyed buffers."""
    for rank, found in enumerate(results(size, nvlink)):
        assert not {check: message for check, message in found.items() if message}, f"rank {rank} of {size}"
        assert len(found) == 30


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(60)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.id)
def test_a_fault_of_the_adapter_fails_the_contract(fault) -> None:
    """Twenty ways to get it wrong, each planted alone: somebody notices, on two nodes of two ranks."""
    source = ADAPTER.read_text()
    assert source.count(fault.old) == 1, f"the adapter does not contain, once: {fault.old}"
    try:
        found = ranks.run(
            4, deep_ep_cases.contract, source.replace(fault.old, fault.new), timeout_s=20,
            EP_STAND_IN_NVLINK_RANKS="2", RANKS_PER_NODE="2")
    except ranks.RankError as error:
        assert not re.search("SyntaxError|NameError|ImportError", str(error)), error
        return
    assert any(message for result in found for message in result.values()), "nothing noticed it"


def test_faults_still_fit_the_adapter() -> None:
    """Twenty of them, and each replaces a line that is there once."""
    assert len(FAULTS) >= 20 and len({f.id for f in FAULTS}) == len(FAULTS)
    source = ADAPTER.read_text()
    assert [f.id for f in FAULTS if source.count(f.old) != 1] == []


def test_the_stand_in_has_the_signatures_of_the_library() -> None:
    """Argument by argument with its default: the table was taken from DeepEP 2.1.0's source."""
    sys.path.insert(0, str(deep_ep_cases.STAND_IN))
    try:
        import deep_ep  # pyright: ignore
    finally:
        sys.path.remove(str(deep_ep_cases.STAND_IN))
    assert deep_ep.__version__ == "2.1.0"
    for name, expected in json.loads(SIGNATURES.read_text()).items():
        method = getattr(deep_ep.ElasticBuffer, name.partition(".")[2])
        found = [str(p) for p in inspect.signature(method).parameters.values() if p.name != "self"]
        assert ", ".join(found) == expected, name


@pytest.mark.parametrize(("changed", "told"), [
    (dict(dtype="float32"), "model.dtype = bfloat16"),
    (dict(hidden=2880), "trainer.parallel.pad_hidden = true"),
    (dict(top_k=33), "33 experts per token"),
    (dict(experts=4096, ranks=64), "exceed 2048"),
    (dict(capability=(8, 0)), "SM90"),
    (dict(experts=100), "a divisor of 100"),
    (dict(experts=2048, ranks=2048), "2048 ranks exceed 1024"),
    (dict(experts=1024, ranks=2), "512 experts a rank exceed 256"),
    (dict(experts=120, ranks=12), "not whole nodes of 8"),
    (dict(group_ranks=(0, 2, 4, 6), ranks=4), "not neighbours"),
    (dict(group_ranks=tuple(range(4, 20))), "not neighbours"),
    (dict(experts=1024, ranks=512), "64 nodes exceed 32"),
    (dict(experts=144, ranks=72, ranks_per_node=72), "72 NVLink ranks exceed 64"),
    (dict(experts=2000, ranks=16), "8 NVLink ranks + 125 experts a rank exceed 128"),
    (dict(num_sms=0), "24 is good"),
    (dict(max_tokens=8193), "is not in 1..8192"),
    (dict(fills_uninitialised=True), "fill_uninitialized_memory = False"),
])
def test_a_constraint_is_told_with_its_remedy(changed, told: str) -> None:
    """Alone, by name, before anything is started."""
    assert problems(GOOD) == []
    found = problems(replace(GOOD, **changed))
    assert any(told in message for message in found), found


def test_a_hidden_size_that_is_padded_is_no_problem() -> None:
    """gpt-oss: 2880 becomes 3072 on the wire."""
    padded = replace(GOOD, hidden=2880, pad_hidden=True)
    assert problems(padded) == [] and padded.padded_hidden == 3072


def test_buffer_bytes_are_those_of_the_published_example() -> None:
    """Four nodes, hidden 7168, 8192 tokens: 4.5 GiB, a multiple of 2 MiB."""
    size = buffer_bytes(Demand(experts=256, top_k=8, hidden=7168, ranks=32, ranks_per_node=8, max_tokens=8192))
    assert size % checks.PAGE == 0 and 4.4 < size / 2**30 < 4.6
