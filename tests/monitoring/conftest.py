"""Tests of rules and dashboards have a target of their own, `make test-monitoring`: they need Prometheus, which it fetches."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Without the extra `charts`, which `make test-monitoring` installs, there is nothing to render.
collect_ignore = [] if importlib.util.find_spec("kubernetes_validate") else ["test_keda.py", "test_live.py"]
PROGRAMS = Path(sys.prefix) / "servers" / "prometheus" / "usr" / "bin"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.nightly)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of prometheus and promtool."""
    assert (PROGRAMS / "promtool").exists(), "no promtool: run `make test-monitoring`, which fetches it"
    return PROGRAMS
