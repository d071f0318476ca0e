"""Versions near the workers: the weight server beside the buffer."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from slipstream import config
from slipstream.service_command import WEIGHTS, arguments
from tests.charts.rendering import HELM, ROOT, main_container, of_kind, pods, render
from tests.charts.test_services import options


def test_the_weight_server_is_a_process_of_the_buffers_image_and_role() -> None:
    """Its own name and labels, so that no call for the buffer lands there; the buffer's certificate and account, of which its
    readers' checks go; rollout workers reach it, and it the object store alone."""
    objects = render("buffer", "weightServer.enabled=true", "metrics.podMonitor.enabled=true")
    both = dict(pods(of_kind(objects, "Deployment")))
    buffer, server = both["Deployment/buffer"], both["Deployment/weights-buffer"]
    container = main_container(server)
    assert container["command"] == ["python", "-m", "services.weights"]
    assert container["image"] == main_container(buffer)["image"]
    words = [str(ROOT / "examples/sort-digits/run.toml") if word.endswith("run.toml") else word for word in container["args"]]
    assert arguments(WEIGHTS, words).port == 50051
    assert server["spec"]["serviceAccountName"] == buffer["spec"]["serviceAccountName"]
    secrets = [{v["name"]: v.get("secret", {}).get("secretName") for v in p["spec"]["volumes"]} for p in (buffer, server)]
    assert secrets[0]["tls"] == secrets[1]["tls"]
    for service in of_kind(objects, "Service"):
        selector = service["spec"]["selector"].items()
        selected = [name for name, pod in both.items() if selector <= pod["metadata"]["labels"].items()]
        assert selected == [f"Deployment/{service['metadata']['name']}"]
    policy, = [p for p in of_kind(objects, "NetworkPolicy") if p["metadata"]["name"] == "weights-buffer"]
    callers = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchExpressions"]
    assert callers == [{"key": "slipstream/role", "operator": "In", "values": ["rollout"]}]
    worker, = of_kind(render("rollout"), "NetworkPolicy")
    called = [
        rule["to"][0]["podSelector"]["matchLabels"].get("slipstream/role") for rule in worker["spec"]["egress"]
        if "podSelector" in rule.get("to", [{}])[0]]
    assert server["metadata"]["labels"]["slipstream/role"] in called


def test_its_memory_has_room_for_what_the_run_file_allows() -> None:
    """The default of objects.near.server_bytes fits into the default request with a gigabyte to spare."""
    resources = yaml.safe_load((HELM / "buffer/values.yaml").read_text())["weightServer"]["resources"]
    run = config.load(ROOT / "examples/sort-digits/run.toml")
    assert int(resources["requests"]["memory"].removesuffix("Gi")) << 30 >= run.objects.near.server_bytes + (1 << 30)


def test_the_guide_names_the_server_as_the_chart_does() -> None:
    """objects.near.server of the guide is the Service's name and port, for a release called buffer."""
    said = re.search(r'^server = "(\S+)"', Path(ROOT / "docs/guides/engines.md").read_text(), re.M)
    services = of_kind(render("buffer", "weightServer.enabled=true"), "Service")
    service, = [s for s in services if s["metadata"]["name"] != "buffer"]
    assert said and said[1] == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert options(main_container(dict(pods(render("buffer")))["Deployment/buffer"]))["--port"] == "50051"
