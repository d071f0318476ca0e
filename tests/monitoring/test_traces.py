"""One sample can be followed through a whole run: real processes, a real OTLP endpoint, and a rollout worker that is killed.

Each hop of the walk leaves its span in the process that does it; all of them share the sample's trace and are in causal order.
The work of a worker that is killed is seen as a second lease and a second generation in the same trace. Nothing of what the
model was asked or answered is in a span.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from slipstream import tracing
from slipstream.config import RunFile
from tests.collector import Collector, Span
from tests.e2e import runs
from tests.e2e.conftest import model_dir as model_dir  # a fixture
from tests.e2e.test_kills import kill, wait_until

# What each hop is called, and where it happens; the order of the walk.
HOPS = (
    ("draw", "buffer"), ("lease", "buffer"), ("generation", "rollout"), ("submit", "rollout"), ("store sample", "buffer"),
    ("lease for a score", "buffer"), ("scoring", "reward"), ("store score", "buffer"), ("batch", "buffer"),
    ("train", "trainer"), ("publish", "trainer"))
# (one, another): the other begins when the one has ended.
CAUSES = (
    ("lease", "generation"), ("generation", "submit"), ("lease for a score", "scoring"), ("scoring", "store score"),
    ("train", "publish"))
KILLS = 8
pytestmark = pytest.mark.timeout(600)


def whole(spans: list[Span]) -> bool:
    return {(s.name, s.service.removeprefix("slipstream-")) for s in spans} == set(HOPS)


def retried(spans: list[Span]) -> bool:
    return {s.attempt for s in spans if s.name == "lease"} >= {1, 2}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[tuple[Collector, RunFile]]:
    """A run of which every sample is traced, with rollout workers killed until one is seen to have gone on elsewhere."""
    folder = tmp_path_factory.mktemp("traced")
    with Collector() as collector:
        path = runs.write_run_file(folder, request.getfixturevalue("model_dir")(), {
            "run": {"steps": 100_000}, "rollout": {"lease_s": 1.5, "heartbeat_s": 0.3, "workers": 2, "max_new_tokens": 16},
            "schedule": {"max_lag": 2}, "tracing": {"endpoint": collector.address, "sample_share": 1.0}})
        run = runs.load(path)
        process = runs.start("run", str(path), "--plain")
        try:
            def found() -> bool:
                assert process.poll() is None, process.communicate()[0]
                return any(whole(s) for s in collector.traces.values())

            wait_until(found, 200)
            for _ in range(KILLS):
                kill(run, "rollout-0")
                again(run)
                if any(whole(s) and retried(s) for s in collector.traces.values()):
                    break
            process.send_signal(signal.SIGINT)
            runs.finish(process)
            yield collector, run
        finally:
            process.kill()


def again(run: RunFile) -> None:
    """Until the killed worker is back, and its leases have lapsed and been finished by others."""
    path = run.folder / "services" / "rollout-0.json"
    before = json.loads(path.read_text())["pid"]
    wait_until(lambda: path.exists() and json.loads(path.read_text())["pid"] != before, 150)
    steps = len(runs.metrics(run))
    wait_until(lambda: len(runs.metrics(run)) > steps + 4, 150)


def test_every_hop_of_a_sample_is_in_its_trace(traced: tuple[Collector, RunFile]) -> None:
    """One first span, named by the sample; all others hang below it; no hop begins before its cause."""
    collector, run = traced
    complete = {trace: spans for trace, spans in collector.traces.items() if whole(spans) and not retried(spans)}
    assert len(complete) > 50
    for trace, spans in complete.items():
        by_name = {span.name: span for span in spans}
        assert len(by_name) == len(spans), [s.name for s in spans]
        key = [by_name["draw"].attributes[part] for part in ("epoch", "draw", "sample")]
        assert tracing.ids(run.run.name, *key) == (int(trace, 16), int(by_name["draw"].id, 16))
        assert {s.parent for s in spans} == {"", by_name["draw"].id}
        assert all([s.attributes[part] for part in ("epoch", "draw", "sample")] == key for s in spans)
        hops = [by_name[name] for name, _ in HOPS]
        assert all(a.started <= b.started for a, b in pairwise(hops)), [(h.name, h.started) for h in hops]
        for cause, effect in CAUSES:
            assert by_name[cause].ended <= by_name[effect].started + 1000, (cause, effect)


def test_a_generation_tells_what_happened_to_it(traced: tuple[Collector, RunFile]) -> None:
    """Calls of the environment, model calls, and the swaps of weights that it lived through."""
    generations = [s for s in traced[0].spans if s.name == "generation" and s.attributes["outcome"] == "finished"]
    for span in generations:
        names = [name for name, _, _ in span.events if name != "swap"]
        assert names == [
            "environment reset", "environment reset answered", "turn", "environment step", "environment step answered"], names
        assert all(span.started <= at <= span.ended for _, at, _ in span.events)
        [turn] = [attributes for name, _, attributes in span.events if name == "turn"]
        assert turn["tokens"] == span.attributes["tokens"] and turn["turn"] == 1
    assert any(name == "swap" and attributes["step"] >= 0 for s in generations for name, _, attributes in s.events)


def test_a_sample_whose_worker_was_killed_goes_on_in_its_trace(traced: tuple[Collector, RunFile]) -> None:
    """Two leases; the generation that was finished is the later one; one batch, one step: it was trained once."""
    lost = [spans for spans in traced[0].traces.values() if whole(spans) and retried(spans)]
    assert lost, "no sample was lost and finished elsewhere"
    for spans in lost:
        leases = [s for s in spans if s.name == "lease"]
        assert [s.attempt for s in leases] == list(range(1, len(leases) + 1))
        stored = [s for s in spans if s.name == "store sample" and s.attributes["outcome"] == "accepted"]
        [generation] = [s for s in spans if s.name == "generation" and s.attempt == stored[0].attempt]
        assert generation.attempt > 1 and generation.started >= leases[1].started
        assert [len([s for s in spans if s.name == name]) for name in ("draw", "batch", "train")] == [1, 1, 1]


def test_no_span_quotes_the_model(traced: tuple[Collector, RunFile]) -> None:
    """Who, when, how much: numbers, names of processes, environment and scorer. No digits of a prompt, no list of tokens."""
    texts = {
        str(value) for s in traced[0].spans for attributes in (s.attributes, *(a for _, _, a in s.events))
        for value in attributes.values() if isinstance(value, str)}
    assert {t for t in texts if re.search(r"\d{3,}|=", t)} == set()
    assert len(texts) < 30, texts


def test_no_span_is_lost_without_a_word(traced: tuple[Collector, RunFile]) -> None:
    """Every step of the log was seen, or the trainer said that a collector too slow for it has not taken everything."""
    collector, run = traced
    trained = {s.attributes["step"] for s in collector.spans if s.name == "train"}
    told = "takes no spans" in (run.folder / "logs" / "trainer-0.log").read_text()
    assert told or trained >= set(range(1, len(runs.metrics(run)) + 1))


def test_the_dashboard_links_to_spans_that_there_are() -> None:
    """Each panel of a hop links to the spans of that hop, by a query that names one."""
    dashboard = json.loads(Path("helm/monitoring/dashboards/sample.json").read_text())
    names = []
    for panel in dashboard["panels"]:
        for link in panel.get("fieldConfig", {}).get("defaults", {}).get("links", ()):
            panes = json.loads(parse_qs(urlsplit(link["url"]).query)["panes"][0])
            [query] = panes["traces"]["queries"]
            [name] = re.findall(r'^\{ name = "([^"]+)" && \$\{samples:percentencode\} \}$', query["query"])
            names.append(name)
    assert len(names) == 7 and set(names) < {name for name, _ in HOPS}
