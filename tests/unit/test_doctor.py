"""`slipstream doctor` finds what would be refused later, one line each with the remedy; exit code 1 when something fails."""

import asyncio
import datetime
import json
import re
from pathlib import Path

import pytest

from slipstream import auth, tls_authority
from slipstream.cli import doctor_stores
from slipstream.cli.doctor import Given, doctor, examine
from slipstream.config import parse
from slipstream.errors import NotFound, Unavailable
from tests.redis_server import redis_process

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `slipstream certs` writes it."""
    folder = tmp_path_factory.mktemp("certs")
    for role in auth.ROLES:
        tls_authority.issue(tls_authority.open_authority(folder / "authority"), folder / role, role)
    return folder


def settings(folder: Path, **sections):
    """A run file's tables."""
    data = {"run": {"name": "demo", "folder": str(folder)}, "model": {"build": {"model_type": "qwen3_moe"}},
            "environments": [{"name": "e", "entry": "m:C"}], **sections}
    return data


def look(folder: Path, given: Given, **sections) -> dict[str, tuple[str, str]]:
    """name → (state, sentence)"""
    return {f.name: (f.state, f.text) for f in asyncio.run(examine(parse(settings(folder, **sections)), given))}


def test_a_laptop_run_is_fine(tmp_path: Path, capsys):
    """Nothing set: every check is ok, the command exits with 0, and the run folder is as empty as before."""
    (tmp_path / "run.json").write_text(json.dumps(settings(tmp_path / "run")))
    assert doctor(tmp_path / "run.json", [], Given()) == 0
    out = capsys.readouterr().out
    assert "7 checks, none failed" in out and "FAIL" not in out and not (tmp_path / "run").exists()
    assert doctor(tmp_path / "run.json", ["buffer.redis=redis://10.0.0.5:1"], Given(roles=("trainer",))) == 1
    assert "FAIL  plaintext" in capsys.readouterr().out


def test_a_trainer_on_several_ranks(tmp_path: Path):
    """What DeepEP needs on EFA and this machine lacks: a warning here, a failure where the trainer is to run. Variables that
    the trainer sets itself are not missing."""
    def found(given: Given, **parallel) -> dict[str, list[str]]:
        states: dict[str, list[str]] = {}
        sections = {"trainer": {"parallel": {"ranks": 16, "experts": 16, **parallel}}}
        for finding in asyncio.run(examine(parse(settings(tmp_path, **sections)), given)):
            if finding.name == "trainer.parallel":
                states.setdefault(finding.state, []).append(finding.text)
        return states

    trainer, efa = Given(roles=("trainer",)), dict(exchange="deep_ep", instance_type="p5en.48xlarge")
    lacks = found(trainer, **efa)["FAIL"]
    assert any("EFA adapters are visible; request vpc.amazonaws.com/efa" in text for text in lacks)
    assert not any("is not set" in text for text in lacks)
    assert list(found(Given(), **efa)) == ["warn"] and not found(Given(roles=("buffer",)), **efa)
    assert found(trainer, exchange="deep_ep", instance_type="p4d.24xlarge")["FAIL"] == [
        "DeepEP on p4d.24xlarge: trainer.parallel.instance_type = 'p4d.24xlarge': DeepEP V2 needs SM90; set exchange = "
        "hierarchical"]
    assert "not below rollout.lease_s = 60" in found(trainer, collective_timeout_s=90)["warn"][0]
    assert found(trainer) == {"ok": ["16 ranks, exchange auto"]}


def test_a_model_that_is_not_there(tmp_path: Path):
    """Whoever holds weights is told; a buffer's pod has no model and is not asked for one."""
    missing = {"model": {"path": str(tmp_path / "none")}}
    state, text = look(tmp_path, Given(), **missing)["model"]
    assert state == "FAIL" and "is not a directory; download the model there" in text
    assert "model" not in look(tmp_path, Given(roles=("buffer",)), **missing)
    (tmp_path / "file").touch()
    state, text = look(tmp_path, Given(), objects={"near": {"cache": str(tmp_path / "file")}})["model"]
    assert state == "FAIL" and "is no folder and cannot be made" in text


def test_a_folder_of_good_certificates(tmp_path: Path, certs: Path):
    """Each role is named with its end; the authority's key beside them is a warning."""
    found = look(tmp_path, Given(tls_dir=str(certs)))
    for role in auth.ROLES:
        assert found[f"certificate {role}"] == (
            "ok", "ends in 90 days; run any; authority CN=slipstream development")
    assert found["authority"][0] == "warn" and "move it away" in found["authority"][1]


@pytest.mark.parametrize("how, says", [
    ({"starts": NOW - 9 * DAY, "lifetime": 8 * DAY}, r"it ended 24\.\d h ago: renew it"),
    ({"starts": NOW + DAY}, r"it begins in 23\.\d h: set this machine's clock"),
    ({"uris": ()}, "it is not of role trainer, run demo: its URIs are none; it needs one"),
    ({"run": "other"}, "its URIs are spiffe://slipstream/trainer/other"),
    ({"trusted": tls_authority.create_authority("x").pem}, "no authority in ca.crt issued tls.crt"),
])
def test_a_certificate_that_would_be_refused(tmp_path: Path, how: dict, says: str):
    """By its end, its role, its run or its authority: the finding says which, and what to do."""
    tls_authority.issue(tls_authority.create_authority(), tmp_path, "trainer", **how)
    state, text = look(tmp_path, Given(("trainer",), str(tmp_path)))["certificate trainer"]
    assert state == "FAIL" and re.search(says, text), text


def test_a_mounted_secret_and_a_late_renewal(tmp_path: Path):
    """A folder without roles says itself whose it is; with a tenth of its life left it is late, which does not fail."""
    tls_authority.issue(tls_authority.create_authority(), tmp_path, "reward", "demo", 10 * DAY, starts=NOW - 9 * DAY)
    state, text = look(tmp_path, Given(tls_dir=str(tmp_path)))["certificate reward"]
    assert state == "warn" and re.match(r"ends in 2[34]\.\d h; run this run;", text) and "late" in text


def test_key_files_are_for_their_owner(tmp_path: Path, certs: Path):
    """A key or a secret that others can read, and a secret that is none."""
    tls_authority.issue(tls_authority.create_authority(), tmp_path / "cli", "cli")
    (tmp_path / "cli" / "tls.key").chmod(0o644)
    (tmp_path / "secret").write_text("x" * 40)
    (tmp_path / "secret").chmod(0o644)
    found = look(tmp_path, Given(("cli",), str(tmp_path)))
    key = f"{tmp_path}/cli/tls.key"
    assert found["certificate cli"] == ("FAIL", f"{key} can be read by others: chmod 600 {key}")
    assert found["secret"] == ("FAIL", f"{tmp_path}/secret can be read by others: chmod 600 {tmp_path}/secret")
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "secret").write_text("\n".join("abc" * 8 for _ in range(3)))
    assert look(tmp_path, Given(("cli",)))["secret"][0] == "warn"
    assert look(tmp_path, Given(secret_file=str(tmp_path / "no")))["secret"][0] == "FAIL"


@pytest.mark.parametrize("sections, says", [
    ({"buffer": {"redis": "redis://u:pass@10.0.0.5:6379"}}, "buffer.redis is at 10.0.0.5:6379, .* use rediss://"),
    ({"objects": {"endpoint": "http://store.example:9000"}}, "objects.endpoint is at store.example:9000, .* use https://"),
    ({"service": {"buffer_address": "10.0.0.1:5"}}, "service.buffer_address is at 10.0.0.1:5, .* set security.tls_dir"),
    ({"environments": [{"name": "e", "address": "10.0.0.2:5", "insecure": True}]}, "environments.e.address .* remove insecure"),
])
def test_plaintext_that_leaves_the_machine(tmp_path: Path, sections: dict, says: str):
    """Whatever the run file names is looked at; the sentence carries no password."""
    state, text = look(tmp_path, Given(("rollout",)), **sections)["plaintext"]
    assert state == "FAIL" and re.search(says, text) and "pass@" not in text


def test_run_files_that_differ(tmp_path: Path):
    """The hash that the buffer compares, beforehand; it does not cover what may differ between machines."""
    run = parse(settings(tmp_path))
    assert parse(settings(tmp_path, security={"tls_dir": "/elsewhere"})).hash == run.hash
    assert look(tmp_path, Given(expect_hash=run.hash))["run file"][0] == "ok"
    assert look(tmp_path, Given(expect_hash="0000"))["run file"][0] == "FAIL"


def test_redis_as_durable_as_promised(tmp_path: Path):
    """A real server: always is ok, memory alone is not; one that is not there is named without its password."""
    with redis_process(tmp_path / "redis") as server:
        states = {
            durability: look(tmp_path, Given(("buffer",)), buffer={"redis": server.url, "durability": durability})
            for durability in ("always", "memory")}
    assert states["memory"]["redis"][0] == states["memory"]["redis durability"][0] == "ok"
    assert states["always"]["redis durability"][0] == "FAIL" and "set append" in states["always"]["redis durability"][1]
    gone = look(tmp_path, Given(("buffer",)), buffer={"redis": "redis://:pass@127.0.0.1:1"})["redis"]
    assert gone[0] == "FAIL" and "redis://:***@127.0.0.1:1 does not answer" in gone[1]


class Bucket:
    """A store whose policy lets one identity write these prefixes."""

    url = "s3://bucket/run"

    def __init__(self, *writable: str):
        self.writable, self.left = writable, []

    async def put_if_absent(self, key, data):
        if key.partition("/")[0] not in self.writable:
            raise Unavailable("s3://bucket/run refuses access (AccessDenied)", "S3_ACCESS")
        self.left.append(key)
        return True

    async def delete(self, key):
        if key not in self.left:
            raise NotFound(key)
        self.left.remove(key)


@pytest.mark.parametrize("role, writable, state", [
    ("rollout", ("routes",), "ok"), ("rollout", ("routes", "versions"), "FAIL"), ("trainer", ("versions", "checkpoints"), "ok"),
    ("trainer", ("versions", "checkpoints", "batches"), "FAIL"), ("reward", (), "ok")])
async def test_an_identity_that_may_write_too_much(role, writable, state):
    """Each role is tried on what only another one writes; the probe leaves nothing."""
    bucket = Bucket(*writable)
    finding = await doctor_stores.least(bucket, role)  # type: ignore[arg-type]
    assert finding.state == state and bucket.left == []
    assert state == "ok" or "narrow its policy" in finding.text


def test_a_file_store_that_everybody_can_write(tmp_path: Path):
    """Objects on disk are as safe as their folder."""
    (tmp_path / "objects").mkdir()
    found = look(tmp_path, Given(("trainer",)))
    assert found["objects"][1].endswith("is writable and honours conditions") and found["objects folder"][0] == "ok"
    (tmp_path / "objects").chmod(0o777)
    assert look(tmp_path, Given(("trainer",)))["objects folder"] == (
        "FAIL", f"{tmp_path}/objects can be written by everybody on this machine: chmod o-w {tmp_path}/objects")
