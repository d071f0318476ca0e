"""Workers that serve versions to each other: one name for all of them, and the way between them open."""

from __future__ import annotations

import re

from slipstream import auth
from tests.charts.rendering import ROOT, Manifest, main_container, of_kind, pods, render
from tests.charts.test_services import options

FULL = ("peers.enabled=true", "nodes=2", "spot.onDemandReplicas=2", "prepull.enabled=true", "prepull.tag=next")


def between(policy: Manifest, way: str) -> list[Manifest]:
    """Rules of a NetworkPolicy that are about rollout workers."""
    key = "from" if way == "ingress" else "to"
    return [rule for rule in policy["spec"][way] if "rollout" in str(rule.get(key)) and "slipstream/role" in str(rule.get(key))]


def test_one_name_stands_for_all_workers_of_the_run() -> None:
    """Headless, so that a look-up gives every address, of leaders and of the nodes behind them, whatever their release and
    tier, ready or not; not of pods that only fetch images."""
    objects = render("rollout", *FULL)
    service, = of_kind(objects, "Service")
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    selected = {
        name for name, pod in pods(objects) if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()}
    assert selected == {name for name, _ in pods(objects) if not name.startswith("DaemonSet")} and len(selected) == 4
    other = dict(pods(render("rollout", release="rollout-b")))["Deployment/rollout-b"]
    assert service["spec"]["selector"].items() <= other["metadata"]["labels"].items()
    port = service["spec"]["ports"][0]["port"]
    assert {options(main_container(pod))["--port"] for _, pod in pods(render("rollout", "peers.enabled=true"))} == {str(port)}
    assert "rollout" in auth.ALLOWED["slipstream.weights.v1.WeightService/ReadRange"]


def test_the_way_between_workers_is_open_only_with_peers() -> None:
    """Both ends of the network policy name the role, at the gRPC port."""
    for peers, count in (("true", 1), ("false", 0)):
        objects = render("rollout", f"peers.enabled={peers}")
        policy, = of_kind(objects, "NetworkPolicy")
        for way in ("ingress", "egress"):
            rules = between(policy, way)
            assert len(rules) == count and all(rule["ports"] == [{"port": 50051, "protocol": "TCP"}] for rule in rules)
        assert len(of_kind(objects, "Service")) == count


def test_the_guide_names_the_service_as_the_chart_does() -> None:
    """objects.near.peers of the guide is the Service's name and port, for a release called rollout."""
    said = re.search(r'^peers = \["(\S+)"\]', (ROOT / "docs/guides/engines.md").read_text(), re.M)
    service, = of_kind(render("rollout", "peers.enabled=true"), "Service")
    assert said and said[1] == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
