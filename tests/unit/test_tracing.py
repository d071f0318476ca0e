"""Traces of samples: one id for each wherever it is, nothing when off, nothing that waits when the collector is away."""

from __future__ import annotations

import asyncio
import datetime
import socket
import subprocess
import sys
import time
from collections import Counter

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from slipstream import config, tls_authority, tracing
from slipstream.environment import Action, Environment, EpisodeReset, EpisodeStep, Reset, Step, Task
from slipstream.environments.remote import RemoteEnvironment
from slipstream.environments.server import EnvironmentServer
from slipstream.errors import ConfigError
from slipstream.lifecycle import SystemClock
from slipstream.protos.types.v1 import sample_pb2
from tests.collector import Collector
from tests.ports import free_port


def run_file(**settings):
    return config.parse({
        "run": {"name": "traced"}, "model": {"path": "model"}, "tracing": settings,
        "environments": [{"name": "e", "entry": "slipstream.environments.sort_digits:SortDigits"}]})


def tracer(count=lambda outcome, spans: None, **settings):
    return tracing.Tracer(run_file(**settings), "rollout", "rollout-0", SystemClock(), count)


def lease(draw, sample, attempt=1):
    return sample_pb2.Lease(
        attempt=attempt, sample=sample_pb2.SampleId(index=sample, draw=sample_pb2.DrawId(number=draw, ledger_epoch=1)))


def test_every_process_knows_a_samples_trace_by_itself():
    """It is a hash of run, epoch, draw and sample, here and on the command line; a share of all draws is chosen by a hash."""
    assert len({tracing.ids("r", 1, draw, sample) for draw in range(100) for sample in range(8)}) == 800
    assert tracing.ids("r", 1, 5, 3) == tracing.ids("r", 1, 5, 3) != tracing.ids("s", 1, 5, 3)
    printed = subprocess.run(
        [sys.executable, "-m", "slipstream.tracing", "r", "5", "3"], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == f"{tracing.ids('r', 1, 5, 3)[0]:032x}"
    with Collector() as collector:
        some = tracer(endpoint=collector.address, sample_share=0.25)
        picked = sum(some.traced(1, draw, 0) is not None for draw in range(4000))
        assert all((some.traced(1, d, 0) is None) == (some.traced(1, d, 7) is None) for d in range(100))  # whole groups
        asyncio.run(some.close())
    assert 900 < picked < 1100


def test_a_samples_spans_are_one_trace():
    """The first names the trace; those of other processes hang below it; events are within; a call for it carries its id."""
    with Collector() as collector:
        buffer, rollout = (tracer(endpoint=collector.address, sample_share=1.0) for _ in range(2))
        of = buffer.traced(1, 7, 2)
        buffer.end(buffer.begin("draw", of, (1, 7, 2), root=True))
        open_spans = tracing.OpenSpans(rollout, "generation")
        open_spans.begin([lease(7, 2), lease(7, 3)], worker="rollout-0")
        open_spans.event([(1, 7, 2, 1)], "turn", turn=1, tokens=9)
        open_spans.event(None, "swap", version=3)
        carried = open_spans.parent([(1, 7, 2, 1)])
        assert open_spans.parent([(1, 7, 2, 1), (1, 7, 3, 1)]) == ""  # of two none is meant
        assert open_spans.end((1, 7, 2, 1), "finished", tokens=9) and not open_spans.end((1, 7, 2, 1), "finished")
        for each in (buffer, rollout):
            asyncio.run(each.close())
        draw, generation = collector.traces[f"{of[0]:032x}"]
    assert (draw.name, draw.parent, draw.id) == ("draw", "", f"{of[1]:016x}")
    assert (generation.parent, generation.service, generation.instance) == (draw.id, "slipstream-rollout", "rollout-0")
    assert generation.attributes == {
        "epoch": 1, "draw": 7, "sample": 2, "attempt": 1, "worker": "rollout-0", "outcome": "finished", "tokens": 9}
    assert [(name, attributes) for name, _, attributes in generation.events] == [
        ("turn", {"turn": 1, "tokens": 9}), ("swap", {"version": 3})]
    assert carried == f"00-{generation.trace}-{generation.id}-01"


def test_without_a_collector_nothing_of_it_is_imported():
    """And OpenSpans does nothing. (redis-py, which the buffer has, looks for OpenTelemetry's metrics by itself.)"""
    code = ("import sys, services.rollout.worker, services.reward.worker, slipstream.environments.server; "
            "assert not [m for m in sys.modules if m.startswith('opentelemetry')]; import services.buffer.service; "
            "assert not [m for m in sys.modules if m.startswith(('opentelemetry.exporter', 'opentelemetry.proto'))]")
    subprocess.run([sys.executable, "-c", code], check=True)
    spans = tracing.OpenSpans(None, "generation")
    spans.begin([lease(1, 1)])
    assert spans.parent([(1, 1, 1, 1)]) == "" and not spans.end((1, 1, 1, 1), "finished")


def test_a_collector_that_is_away_costs_spans_and_nothing_else(monkeypatch):
    """Nothing waits for it; what does not fit, or is not taken, is counted; the stop keeps its budget."""
    monkeypatch.setattr(tracing, "QUEUE", 600)
    monkeypatch.setattr(tracing, "EXPORT_S", 0.3)
    monkeypatch.setattr(tracing, "CLOSE_S", 0.2)
    counted, nowhere = Counter(), f"127.0.0.1:{free_port()}"
    away = tracer(lambda outcome, spans: counted.update({outcome: spans}), endpoint=nowhere, sample_share=1.0)
    started = time.perf_counter()
    away.hop("lease", [(1, draw, 0, 1) for draw in range(5000)], away.now())
    assert time.perf_counter() - started < 3
    assert counted["dropped"] > 100
    started = time.perf_counter()
    asyncio.run(away.close())
    assert time.perf_counter() - started < 2
    assert sum(counted.values()) == 5000 and not counted["exported"] and counted["refused"] > 0


def test_a_stop_does_not_wait_for_a_collector_that_says_nothing(monkeypatch, caplog):
    """It takes the connection and no more: one message may last its time, those behind it are dropped."""
    monkeypatch.setattr(tracing, "EXPORT_S", 0.5)
    monkeypatch.setattr(tracing, "CLOSE_S", 0.1)
    monkeypatch.setattr(tracing, "LOT", 100)
    counted = Counter()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        some = tracer(
            lambda outcome, spans: counted.update({outcome: spans}), endpoint=f"127.0.0.1:{silent.getsockname()[1]}",
            sample_share=1.0)
        some.hop("lease", [(1, draw, 0, 1) for draw in range(2000)], some.now())  # twenty messages, half a second each
        asyncio.run(some.close())
    assert sum(counted.values()) == 2000 and counted["dropped"] >= 1500, counted
    assert "left behind" not in caplog.text


def test_a_collector_that_comes_back_gets_spans_again(monkeypatch):
    monkeypatch.setattr(tracing, "PERIOD_S", 0.05)
    monkeypatch.setattr(tracing, "EXPORT_S", 0.3)
    port, counted = free_port(), Counter()
    some = tracer(lambda outcome, spans: counted.update({outcome: spans}), endpoint=f"127.0.0.1:{port}", sample_share=1.0)
    some.hop("lease", [(1, 1, 0, 1)], some.now())
    wait_until(lambda: counted["refused"] == 1)
    with Collector(port) as collector:
        def again():
            some.hop("lease", [(1, 2, 0, 1)], some.now())
            return counted["exported"]

        wait_until(again)
        asyncio.run(some.close())
        assert {s.attributes["draw"] for s in collector.spans} == {2}


def test_the_collector_is_encrypted_off_loopback_or_when_an_authority_is_named(tmp_path, monkeypatch):
    """With `ca_file` TLS is spoken, and only to who has a certificate of that authority."""
    monkeypatch.setattr(tracing, "EXPORT_S", 1.0)
    authority = tls_authority.create_authority()
    credentials, outcomes = served_as("localhost", authority), {}
    (tmp_path / "own").write_bytes(authority.pem)
    (tmp_path / "other").write_bytes(tls_authority.create_authority().pem)
    with Collector(credentials=credentials) as collector:
        endpoint = f"localhost:{collector.address.rpartition(':')[2]}"
        for name in ("own", "other"):
            counted = outcomes[name] = Counter()
            some = tracer(
                lambda outcome, spans, counted=counted: counted.update({outcome: spans}), endpoint=endpoint, sample_share=1.0,
                ca_file=str(tmp_path / name))
            some.hop("lease", [(1, 1, 0, 1)], some.now())
            asyncio.run(some.close())
    assert outcomes == {"own": {"exported": 1}, "other": {"refused": 1}}
    assert "credentials" in tracing._channel(run_file(endpoint="collector.example:4317"))
    assert tracing._channel(run_file(endpoint="collector.example:4317", insecure=True)) == {
        "endpoint": "collector.example:4317", "insecure": True}


def test_settings_that_cannot_work_are_told_in_one_line(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="is not host:port; collectors listen on 4317"):
        run_file(endpoint="collector")
    with pytest.raises(ConfigError, match="cannot be read"):
        tracer(endpoint="collector:4317", ca_file=str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"pip install 'slipstream\[tracing\]'"):
        tracer(endpoint="collector:4317")


def test_traces_are_switched_on_for_one_service_at_a_time():
    """The buffer refuses workers of another run file; the section is no part of what it compares."""
    assert run_file().hash == run_file(endpoint="collector:4317", sample_share=0.5, insecure=True).hash


def test_whoever_writes_an_environment_can_go_on_with_the_trace():
    """Over gRPC and into the thread that runs the user's code."""
    seen = []

    class Noting(Environment):
        def reset(self, task: Task) -> Reset:
            seen.append(tracing.traceparent())
            return Reset("go")

        async def step(self, episode, action) -> Step:
            seen.append(tracing.traceparent())
            return Step(done=True, reward=1.0)

    async def play():
        async with EnvironmentServer(Noting()) as server, RemoteEnvironment(
                config.Environment(name="e", address=server.address)) as client:
            for episode, parent in (("1", "00-" + 32 * "a" + "-" + 16 * "b" + "-01"), ("2", "")):
                with tracing.on_behalf(parent):
                    await client.reset([EpisodeReset(episode, Task(0, 0))])
                    await client.step([EpisodeStep(episode, 1, Action("x"))])

    asyncio.run(play())
    assert seen == ["00-" + 32 * "a" + "-" + 16 * "b" + "-01"] * 2 + [""] * 2


def served_as(name, authority):
    """Credentials of a server that this authority calls `name`."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder().subject_name(x509.Name([])).issuer_name(authority.certificate.subject)
        .public_key(key.public_key()).serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=True).sign(authority.key, hashes.SHA256()))
    pem = serialization.Encoding.PEM
    return grpc.ssl_server_credentials([(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        certificate.public_bytes(pem))])


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
