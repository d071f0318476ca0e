"""Chart tests have a target of their own, `make test-charts`: they need helm, which it fetches."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Without the extra `charts` there is nothing to collect; `make test-charts`, which installs it, fails when it collects nothing.
collect_ignore_glob = [] if importlib.util.find_spec("kubernetes_validate") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.nightly)
            item.add_marker(pytest.mark.slow)
