"""EFA presets: what is emitted for an instance type, and what a machine is told that it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trainer.parallel.fabric import INSTANCES, PLUGIN, main, missing, preset
from slipstream.errors import ConfigError

B300 = "p6-b300.48xlarge"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The root of a host on which nothing is missing for GPU-initiated EFA."""
    for number in range(INSTANCES[B300].adapters):
        (tmp_path / "sys/class/infiniband" / f"rdmap{number}").mkdir(parents=True)
    for name, content in {
        "dev/gdrdrv": "", "sys/module/efa/version": "3.3.0g\n", PLUGIN: "..ncclGinPlugin_v14..",
        "proc/driver/nvidia/params": 'RegistryDwords: "PeerMappingOverride=1;"\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


def test_gda_where_the_instance_has_it_and_the_proxy_elsewhere() -> None:
    """Type 5 never without its companions: alone it crashes, or gives wrong results with an ordered kernel."""
    for kind, found in INSTANCES.items():
        emitted = preset(kind)
        assert emitted["NCCL_GIN_TYPE"] == ("5" if found.gda else "2")
        assert emitted.get("NCCL_SYM_GIN_KERNELS_ENABLE") == ("0" if found.gda else None)
        assert emitted.get("EP_HYBRID_KERNEL") == ("unordered" if found.gda else None)
    assert preset(B300)["NCCL_IB_HCA"] == "rdmap" and preset(B300, "proxy")["NCCL_GIN_TYPE"] == "2"


@pytest.mark.parametrize(("kind", "transport", "told"), [
    ("p4d.24xlarge", None, "SM90"), ("p5.48xlarge", "gda", "set proxy"), ("m5.large", None, "is none of p5.48xlarge")])
def test_what_cannot_be_is_refused(kind, transport, told) -> None:
    with pytest.raises(ConfigError, match=told):
        preset(kind, transport)


def test_a_machine_with_everything_lacks_nothing(machine: Path) -> None:
    assert missing(B300, None, preset(B300), machine, (2, 31, 2)) == []


@pytest.mark.parametrize(("lost", "told"), [
    ("dev/gdrdrv", "GDRCopy"), ("sys/module/efa/version", "efa driver is not loaded"), (PLUGIN, "EFA installer 1.50"),
    ("proc/driver/nvidia/params", "PeerMappingOverride")])
def test_each_missing_part_is_told_alone(machine: Path, lost: str, told: str) -> None:
    (machine / lost).unlink()
    [message] = missing(B300, None, preset(B300), machine)
    assert told in message


def test_old_parts_and_wrong_variables_are_told(machine: Path) -> None:
    """Versions too low, a plugin without the symbol, an adapter too few, a variable that somebody changed."""
    (machine / "sys/module/efa/version").write_text("2.17.3\n")
    (machine / PLUGIN).write_text("ncclGinPlugin_v13")
    (machine / "sys/class/infiniband/rdmap0").rmdir()
    found = missing(B300, None, preset(B300) | {"NCCL_GIN_TYPE": "3"}, machine, (2, 30, 4))
    for told in ("2.17.3", "no ncclGinPlugin_v14", "15 of 16", "NCCL_GIN_TYPE is 3; set NCCL_GIN_TYPE=5", "NCCL is 2.30.4"):
        assert any(told in message for message in found), (told, found)
    assert len(found) == 5


def test_the_command_prints_lines_for_a_pod(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--instance-type", "p5.48xlarge"]) == 0
    assert "NCCL_GIN_TYPE=2" in capsys.readouterr().out.splitlines()
    assert main(["--instance-type", "p5.48xlarge", "--check"]) == 1
    assert "vpc.amazonaws.com/efa: 32" in capsys.readouterr().out
    assert main(["--instance-type", "p3"]) == 2
