"""What of a release others rely on: the contract, defaults and format numbers that `make lint` compares with the last one."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest

import slipstream
from slipstream.cli.run_folder import RunFolder
from slipstream.cli.run_start import lay_out
from slipstream.config import parse
from slipstream.errors import ConfigError, InvalidInput
from slipstream.formats import known
from tools import check_release

ROOT = Path(__file__).resolve().parents[2]
NOW = {"release": "9", "contract": check_release.contract(check_release.files()), "settings": check_release.settings(),
       "formats": check_release.formats()}
FIELD = "field 1 of slipstream.buffer.v1.LeaseSamplesRequest"
METHOD = "method slipstream.buffer.v1.BatchService.ReadBatch"


def test_the_working_tree_lives_beside_the_last_release() -> None:
    """The same as `make lint`."""
    released = json.loads(check_release.RELEASED.read_text())
    note = check_release.NEXT.read_text() if check_release.NEXT.exists() else ""
    assert not check_release.breaks(released, NOW, note)
    assert len(released["contract"]) > 300 and len(released["settings"]) > 100


def test_each_way_to_break_a_peer_is_told() -> None:
    """A field, value or method that goes away, moves to another number, changes its type, its name or its streaming."""
    kept = NOW["contract"]
    assert kept[FIELD] == "string worker" and kept[METHOD].endswith("-> stream of slipstream.buffer.v1.ReadBatchResponse")
    value = next(name for name in kept if name.startswith("value 1 of"))
    moved = {k: v for k, v in kept.items() if k != FIELD} | {FIELD.replace("field 1", "field 99"): kept[FIELD]}
    for contract, words in (
        (moved, f"{FIELD} is gone, it was string worker"),
        (kept | {FIELD: "bytes worker"}, f"{FIELD} was string worker and is bytes worker"),
        (kept | {FIELD: "repeated string worker"}, "is repeated string worker"),
        (kept | {METHOD: kept[METHOD].replace("stream of ", "")}, f"{METHOD} was"),
        ({k: v for k, v in kept.items() if k != METHOD}, f"{METHOD} is gone"),
        ({k: v for k, v in kept.items() if k != value}, f"{value} is gone"),
    ):
        found = check_release.breaks(NOW, {**NOW, "contract": contract}, f"`{FIELD}` `{METHOD}`")  # no note helps
        assert len(found) == 1 and words in found[0] and "services of release 9 would break" in found[0]


def test_additions_are_free() -> None:
    later = copy.deepcopy(NOW)
    later["contract"] |= {FIELD.replace("field 1", "field 99"): "string more", "method slipstream.buffer.v2.X.Y": "a -> b"}
    later["settings"] |= {"rollout.added": "1"}
    assert not check_release.breaks(NOW, later, "")


def test_a_default_or_a_format_changes_only_with_a_note() -> None:
    """Two releases of one run would otherwise take the same run file for different things."""
    other = {**NOW, "settings": NOW["settings"] | {"schedule.max_lag": "3"},
             "formats": NOW["formats"] | {"format of the ledger": "99"}}
    found = check_release.breaks(NOW, other, "")
    assert len(found) == 2 and "schedule.max_lag was 2 and is 3" in found[0] and "docs/releases/next.md" in found[0]
    note = "`schedule.max_lag` is 3 now: set it. The `format of the ledger` is new: rebuild."
    assert not check_release.breaks(NOW, other, note)


def test_what_is_read_from_files_is_what_the_code_uses() -> None:
    from services.buffer.ledger import SCHEMA
    from slipstream.manifest import FORMAT

    assert NOW["formats"]["format of the ledger"] == str(SCHEMA)
    assert NOW["formats"]["format of a version's manifest"] == str(FORMAT)


def test_the_version_is_one_everywhere() -> None:
    """The package's, the charts' and, for a released one, its note."""
    for chart in (ROOT / "helm").glob("*/Chart.yaml"):
        app = re.search(r'^appVersion: "(.*)"$', chart.read_text(), re.M)
        assert chart.parent.name == "common" or (app and app[1] == slipstream.__version__), chart
    released = json.loads(check_release.RELEASED.read_text())["release"]
    assert (ROOT / f"docs/releases/{released}.md").exists()


@pytest.mark.parametrize(("number", "words"), [
    (3, "has format 3, release .* reads formats 1 to 2; a newer release wrote it"), (0, "an older release wrote it"),
    (None, "an older release wrote it: go on with that one, or see docs/releases"), ("2", "an older release wrote it")])
def test_an_unknown_format_is_refused_with_the_remedy(number: object, words: str) -> None:
    known("x", 1, 2, oldest=1)
    with pytest.raises(InvalidInput, match=words):
        known("x", number, 2, oldest=1)


def test_a_run_folder_carries_its_format(tmp_path: Path) -> None:
    """One without a number is of the first format; one of a later release is not resumed, and not touched."""
    run = parse({"run": {"name": "a", "folder": str(tmp_path)}, "model": {"path": "m"}, "environments": [
        {"name": "e", "entry": "m:C"}]})
    (tmp_path / "lock").touch()

    def begin() -> None:
        lay_out(RunFolder(tmp_path), run, fresh=False)

    begin()
    begin()
    path = tmp_path / "release.json"
    assert json.loads(path.read_text()) == {"format": 1, "release": slipstream.__version__}
    later = json.dumps({"format": 2, "release": "9.0.0"})
    path.write_text(later)
    with pytest.raises(ConfigError, match="a newer release wrote it"):
        begin()
    assert path.read_text() == later
    path.write_text("")
    with pytest.raises(ConfigError, match="is damaged"):
        begin()
    path.unlink()
    begin()
