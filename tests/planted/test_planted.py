"""The tests notice what they claim to notice: each fault of faults.py is planted in a copy of the code, and is caught.

Every fault runs in `make test-planted`; `make test` plants a few and looks whether the others still fit the code.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted.faults import FAULTS, HANGS, Fault

ROOT = Path(__file__).parents[2]
LIMIT_S = 30  # of one test
HANG_S = 8  # of one that is to hang
# Whatever else is on the path, the copy is what runs, in the processes that tests start too.
RUN = """
import sys, pathlib, pytest, services.buffer.ledger, slipstream.config

pytestmark = pytest.mark.slow
here = pathlib.Path.cwd()
assert all(here in pathlib.Path(m.__file__).parents for m in (services.buffer.ledger, slipstream.config)), "not the copy"
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of code and tests."""
    folder = tmp_path_factory.mktemp("planted")
    for name in ("services", "slipstream", "tests"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_tests(tree: Path, *tests: str, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Run tests of the copy in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(
        [sys.executable, "-c", RUN, *tests, "-m", "", "-p", "no:cacheprovider", "--timeout", str(limit_s), "--tb", "short"],
        cwd=tree, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=60 + limit_s * len(tests), check=False)


@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=f.id, marks=[] if f.fast else [pytest.mark.nightly, pytest.mark.slow]) for f in FAULTS])
def test_a_planted_fault_is_caught(tree: Path, fault: Fault) -> None:
    """The test that guards the case fails, by an assertion or its time limit, and for the right reason."""
    original = (tree / fault.path).read_bytes()
    file = fault.plant(tree)
    try:
        result = run_tests(tree, fault.caught_by, limit_s=HANG_S if fault.symptom == HANGS else LIMIT_S)
    finally:
        file.write_bytes(original)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert f"FAILED {fault.caught_by}" in result.stdout and fault.symptom in result.stdout, result.stdout


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_without_a_fault_all_of_them_pass(tree: Path) -> None:
    """It is the fault that fails them, not the copy."""
    result = run_tests(tree, *sorted({f.caught_by for f in FAULTS}))
    assert result.returncode == pytest.ExitCode.OK, result.stdout


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.id)
def test_every_fault_still_fits_the_code(fault: Fault) -> None:
    """When this fails the code has moved on: plant the fault anew where it belongs now."""
    assert (ROOT / fault.path).read_text().count(fault.old) == 1, f"{fault.path} does not contain, once: {fault.old}"
    assert defined(*fault.caught_by.partition("[")[0].split("::")), f"there is no test {fault.caught_by}"


def test_the_table_of_cases_is_true() -> None:
    """docs/cases.md has each of the 17 cases once; the tests that it names exist, and include those that catch the faults."""
    rows = re.findall(r"^\| (\d+) \|(.*)\|(.*)\|(.*)\|$", (ROOT / "docs" / "cases.md").read_text(), re.MULTILINE)
    assert [int(case) for case, *_ in rows] == list(range(1, 18))
    for case, reported, _, tests in rows:
        faults = [f for f in FAULTS if f.case == int(case)]
        assert faults and all(origin in reported for f in faults for origin in f.origin.split(", ")), f"case {case}"
        named = re.findall(r"`(\S+)::(\S+)`", tests)
        assert named and not [n for n in named if not defined(*n)], f"case {case}: {named}"
        assert set(named) >= {(*f.caught_by.partition("[")[0].split("::"),) for f in faults}, f"case {case}"


def defined(path: str, test: str) -> bool:
    return f"def {test}(" in (ROOT / path).read_text()
