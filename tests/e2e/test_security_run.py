"""Whole runs with everything on: real processes with certificates, an environment behind TLS, tokens, logs without prompts.

`make test-security` runs them.
"""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from slipstream import auth, auth_tokens, rpc, tls, tls_authority
from slipstream.auth_credentials import Credentials, of
from slipstream.cli.run_folder import RunFolder
from slipstream.cli.survey import Survey
from slipstream.errors import SlipstreamError
from slipstream.protos.buffer.v1 import batches_pb2, batches_pb2_grpc, ledger_pb2, ledger_pb2_grpc
from tests.e2e import runs
from tests.e2e.plain_loop import plain_loop

PROMPT = re.compile(r"\d{4,8}=")


def issue(authority: tls_authority.Authority, folder: Path) -> None:
    """A fresh certificate for everybody; servers first: they look when their callers, who have seen theirs, connect anew."""
    for role in ("environment", "buffer", *(r for r in auth.ROLES if r not in ("environment", "buffer"))):
        tls_authority.issue(authority, folder / role, role, "test")


def serve_environment(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """`slipstream env serve` with TLS; its process and address. stderr goes to env.log."""
    with (folder / "env.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.cli", "env", "serve", "quoting:Quoting", "--tls-dir", str(folder / "certs"),
             "--run", "test"], cwd=runs.ROOT, env=runs.ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


def secure(folder: Path, model_dir: Path, **sections) -> tuple[Path, tls_authority.Authority]:
    """A run file with certificates of its run, and the authority that signed them."""
    authority = tls_authority.create_authority()
    issue(authority, folder / "certs")
    return runs.write_run_file(folder, model_dir, {"security": {"tls_dir": str(folder / "certs")}, **sections}), authority


async def attempt(address: str, credentials: Credentials, peer: str = "buffer") -> str:
    """The reason for which a commit is refused."""
    async with rpc.channel(address, credentials=credentials, peer=peer) as channel:
        try:
            await rpc.call(
                batches_pb2_grpc.BatchServiceStub(channel).CommitBatches, batches_pb2.CommitBatchesRequest(incarnation=9), 5)
        except SlipstreamError as error:
            return error.reason
    return ""


async def intrude(path: Path, folder: Path) -> dict[str, str]:
    """What happens to those who ask the real buffer to commit a batch in the trainer's stead."""
    run = runs.load(path)
    async with Survey(RunFolder(run.folder)) as survey:  # what `slipstream status` asks
        states = {s.instance: s.state for s in await survey.ask_all() if s.service != "redis"}
    assert set(states) == {"buffer", "reward-0", "rollout-0", "trainer-0"} and set(states.values()) == {"serving"}, states
    address = json.loads((run.folder / "services" / "buffer.json").read_text())["address"]
    tls_authority.issue(tls_authority.create_authority(), folder / "stranger", "trainer", "test")
    (folder / "stranger" / "ca.crt").write_bytes((folder / "certs" / "cli" / "ca.crt").read_bytes())
    token = auth_tokens.sign(auth_tokens.Claims("lab", "client", int(time.time()) + 60), auth.read_secret(run.folder))
    callers = {
        "rollout": of(run, "rollout"), "reward": of(run, "reward"), "cli": of(run, "cli"),
        "client": Credentials("client", "test", certificates=of(run, "client").certificates, token=token),
        "another authority": Credentials("trainer", certificates=tls.Certificates(folder / "stranger", "trainer")),
        "no certificate": Credentials("trainer", authority=folder / "certs" / "cli" / "ca.crt"),
        "plaintext": Credentials("trainer", keys=auth_tokens.Keys(run.folder / "secret"))}
    outcomes = {name: await attempt(address, credentials) for name, credentials in callers.items()}
    async with rpc.channel(address, credentials=of(run, "cli")) as channel:  # and who may ask is answered
        balance = await rpc.call(ledger_pb2_grpc.LedgerServiceStub(channel).GetBalance, ledger_pb2.GetBalanceRequest(), 5)
    assert balance.balance.run == "test"
    return outcomes


def wait_for_step(folder: Path, process: subprocess.Popen[str], step: int) -> None:
    """Until that many steps are trained."""
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_a_run_with_everything_on(tmp_path, model_dir):
    """It trains and loses nothing while strangers ask for a commit, every certificate is renewed, and an environment quotes
    prompts in its exceptions; no log line has one, and `slipstream status` is answered."""
    path, authority = secure(tmp_path, model_dir())
    environment, address = serve_environment(tmp_path)
    try:
        data = json.loads(path.read_text())
        data["environments"] = [{"name": "quoting", "address": address, "scorer": "plain_loop:even_share"}]
        data["run"]["steps"] = 100_000  # until it is stopped
        path.write_text(json.dumps(data))
        run = runs.load(path)
        process = runs.start("run", str(path), "--plain")
        wait_for_step(run.folder, process, 1)
        refused = asyncio.run(intrude(path, tmp_path))
        issue(authority, tmp_path / "certs")
        wait_for_step(run.folder, process, len(runs.metrics(run)) + 3)
        process.send_signal(signal.SIGINT)
        output = runs.finish(process)
    finally:
        environment.terminate()
        environment.wait(20)
    assert refused == {
        "rollout": "ROLE", "reward": "ROLE", "cli": "ROLE", "client": "ROLE", "another authority": "UNAVAILABLE",
        "no certificate": "UNAVAILABLE", "plaintext": "UNAVAILABLE"}
    assert "lost 0, repeated 0" in output.splitlines()[-1], output
    written = {p.name: p.read_text() for p in (*(run.folder / "logs").glob("*.log"), tmp_path / "env.log")}
    renewed = {name for name, text in written.items() if "certificates renewed" in text}
    assert {"buffer.log", "rollout-0.log", "trainer-0.log", "env.log"} <= renewed
    assert "ValueError" in written["env.log"] and "withheld" in written["rollout-0.log"]  # the failures are told, by their kind
    assert {name: found for name, text in written.items() if (found := PROMPT.findall(text))} == {}


@pytest.mark.slow
@pytest.mark.nightly
def test_what_is_learned_does_not_depend_on_it(tmp_path, model_dir):
    """A pinned run behind certificates has the weights of one plain loop in one process, bit for bit."""
    folder, steps = model_dir(), 3
    path, _ = secure(
        tmp_path, folder, run={"steps": steps},
        schedule={"mode": "pinned", "max_lag": 1, "groups_per_batch": 4, "group_size": 4})
    assert "lost 0, repeated 0" in runs.run(path).splitlines()[-1]
    expected = plain_loop(
        folder, steps=steps, max_lag=1, groups=4, group_size=4, new_tokens=6, lr=1e-3, slots=64, context=32)
    versions = runs.published(runs.load(path))
    assert sorted(versions) == list(range(steps + 1))
    for step, weights in enumerate(expected):
        assert all(torch.equal(value, weights[name]) for name, value in versions[step].items()), f"step {step}"
