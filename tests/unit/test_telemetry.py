"""Metrics: every name once, units in the names, labels that cannot explode, an endpoint that serves them."""

import asyncio
import re

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from slipstream import telemetry
from slipstream.errors import ConfigError

GROUPS = [
    telemetry.BufferMetrics, telemetry.RolloutMetrics, telemetry.RewardMetrics, telemetry.TrainerMetrics,
    telemetry.EnvironmentMetrics, telemetry.WeightServerMetrics]


@pytest.fixture
def registry():
    """With the metrics of all services at once: a name used twice would raise here."""
    registry = CollectorRegistry()
    telemetry.ProcessMetrics(registry, "buffer")
    for group in GROUPS:
        group(registry)
    return registry


def test_names_follow_one_scheme(registry):
    """slipstream_<service>_...; times in seconds; a sentence for each; no label that grows with the run."""
    labels = {
        "for_", "method", "code", "service", "version", "python", "kind", "reason", "outcome", "operation", "call", "scorer",
        "proof", "name", "lag", "place"}
    families = [f for f in registry.collect() if not f.name.startswith("process_")]  # those are prometheus_client's own
    assert len(families) > 50
    for family in families:
        assert re.fullmatch(r"slipstream_[a-z_]+", family.name) and family.documentation.endswith(".")
        assert not re.search(r"_(ms|milliseconds|minutes|time)$", family.name)
        assert {name for sample in family.samples for name in sample.labels} <= labels | {"le"}
    for group in GROUPS:
        for metric in vars(group(CollectorRegistry())).values():
            assert set(getattr(metric, "_labelnames", ())) <= labels


def test_a_wait_is_one_series_whatever_it_says():
    """The label is the sentence up to its colon with numbers as #, so that batches are not series; it goes with the wait."""
    registry = CollectorRegistry()
    metrics = telemetry.ProcessMetrics(registry, "trainer")
    for batch in range(100):
        metrics.waiting((f"batch {batch}: {batch} of 64 groups unfinished", 1.5 + batch), batch == 99)
    (family,) = [f for f in registry.collect() if f.name == "slipstream_waiting_seconds"]
    assert [(s.labels, s.value) for s in family.samples] == [({"for_": "batch #"}, 100.5)]
    assert telemetry.figures(registry)["stalled"] == 1
    metrics.waiting(None, False)
    assert "waiting_seconds" not in telemetry.figures(registry)


def test_figures_are_gauges_and_counters_without_labels(registry):
    """For status: names without the prefix, labelled series added up, histograms and build info left out."""
    metrics = telemetry.BufferMetrics(fresh := CollectorRegistry())
    telemetry.ProcessMetrics(fresh, "buffer").observe_rpc("/slipstream.buffer.v1.SampleService/LeaseSamples", "OK", 0.1)
    metrics.open_draws.set(3)
    metrics.groups_dropped.labels("lag").inc(2)
    metrics.groups_dropped.labels("timeout").inc()
    figures = telemetry.figures(fresh)
    assert (figures["buffer_open_draws"], figures["buffer_groups_dropped_total"]) == (3, 3)
    assert not [name for name in figures if "rpc" in name or "build" in name or "created" in name or "process_" in name]


async def test_the_endpoint_serves_what_is_set(registry):
    """Port 0 is a free one; the text is Prometheus'."""
    fresh = CollectorRegistry()
    metrics = telemetry.ProcessMetrics(fresh, "buffer")
    metrics.observe_rpc("/slipstream.buffer.v1.SampleService/LeaseSamples", "OK", 0.004)
    address = telemetry.serve(fresh)
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = (await reader.read()).decode().partition("\r\n\r\n")[2]
    writer.close()
    samples = {(s.name, s.labels.get("method"), s.labels.get("le")): s.value
               for f in text_string_to_metric_families(text) for s in f.samples}
    assert samples["slipstream_rpc_seconds_bucket", "SampleService/LeaseSamples", "0.005"] == 1
    assert samples["slipstream_rpc_seconds_bucket", "SampleService/LeaseSamples", "0.0025"] == 0
    with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use: .* --metrics-port"):
        telemetry.serve(fresh, int(port))
