"""The contract of the DeepEP adapter with the module itself, on the GPUs of this machine: `make test-gpu`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import json

import pytest
import torch

from tests.parallel import deep_ep_cases, ranks
from tests.parallel.test_deep_ep import SIGNATURES

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def gpus() -> int:
    """How many there are. Skips, and says so, without any or without the module."""
    if not torch.cuda.is_available():
        pytest.skip("NOTHING WAS TESTED: there is no GPU on this machine")
    if importlib.util.find_spec("deep_ep") is None:
        pytest.skip("NOTHING WAS TESTED: there is no module deep_ep here; install DeepEP 2.1")
    return torch.cuda.device_count()


def test_signatures_are_those_that_the_stand_in_has() -> None:
    """When this fails, DeepEP has changed: the stand-in and the adapter must follow."""
    library = importlib.import_module("deep_ep")
    for name, expected in json.loads(SIGNATURES.read_text()).items():
        parameters = inspect.signature(getattr(library.ElasticBuffer, name.partition(".")[2])).parameters.values()
        found = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters if p.name != "self"]
        assert ", ".join(found) == expected, name


def test_adapter_keeps_the_contract(gpus: int) -> None:
    """The very suite of tests/parallel/test_deep_ep.py on as many ranks as there are GPUs, up to 4."""
    size = 1 << min(2, gpus.bit_length() - 1)
    environment = {"RANKS_PER_NODE": str(size), "EP_DISABLE_GIN": "1"}  # one node: NVLink alone
    for rank, found in enumerate(ranks.run(size, deep_ep_cases.contract, backend="nccl", timeout_s=800, **environment)):
        assert not {check: message for check, message in found.items() if message}, f"rank {rank} of {size}"
