"""Every chart, with every preset and under every release name, is what an API server takes; a typo is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.charts.rendering import (
    CHARTS,
    HELM,
    PRESETS,
    ROOT,
    SERVICES,
    Manifest,
    Refused,
    faults,
    main_container,
    of_kind,
    pods,
    render,
    text,
)

EVERYTHING = Path(__file__).parent / "everything.yaml"  # one value of each kind that Kubernetes knows

# Everything that is off by default, on.
FULL = {
    "buffer": ("redis.dev.enabled=true", "ports.client=50053", "auth.secretName=tokens", "metrics.podMonitor.enabled=true",
               "weightServer.enabled=true"),
    "reward": ("autoscaling.enabled=true", "auth.secretName=tokens", "metrics.podMonitor.enabled=true"),
    "rollout": ("autoscaling.enabled=true", "autoscaling.kvShare=0.8", "spot.preferred=true", "spot.onDemandReplicas=2",
                "nodes=2", "prepull.enabled=true", "prepull.tag=next", "peers.enabled=true"),
    "trainer": ("nodes=2", "processesPerNode=8", "gpus=8", "efa=16", "hugepages=5120Mi", "sameZone=true", "kueue.queueName=q",
                "kueue.priorityClass=high"),
    "environment": ("autoscaling.enabled=true", "arguments.digits=4"),
    "cluster": ("pools.trainer.enabled=true", "pools.trainer.instanceTypes={p5en.48xlarge}", "pools.trainer.zones={us-east-1a}",
                "pools.trainer.placementGroup=fabric", "pools.trainer.capacityReservations[0].id=cr-0123", "kueue.enabled=true",
                "pools.rollout.enabled=true", "pools.rollout.instanceTypes={g6e.xlarge}", "efaSecurityGroups={sg-0123}"),
    "monitoring": ("rules.labels.release=prometheus", "dashboards.labels.team=research", "labels.team=research"),
}


def check(objects: list[Manifest]) -> None:
    found = [fault for each in objects for fault in faults(each)]
    assert not found, "\n".join(found)
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("chart", "preset"), PRESETS)
def test_every_preset_is_valid(chart: str, preset: str) -> None:
    check(render(chart, preset=preset))


@pytest.mark.parametrize("chart", CHARTS)
def test_everything_on_is_valid(chart: str) -> None:
    check(render(chart, *FULL[chart]))


def test_presets_are_there_for_every_kind_of_node() -> None:
    """GPU services and the pools know each instance type; services without a GPU know a cluster and a laptop."""
    kinds = {"p5", "p5en", "p6-b200", "p6-b300", "g6e"}
    for chart in ("rollout", "trainer"):
        assert {preset for name, preset in PRESETS if name == chart} == kinds | {"dev"}
    assert {preset for name, preset in PRESETS if name == "cluster"} == kinds
    for chart in ("buffer", "reward", "environment"):
        assert {"eks", "dev"} <= {preset for name, preset in PRESETS if name == chart}


@pytest.mark.parametrize("release", ["n", "on", "1e3"])
@pytest.mark.parametrize("chart", CHARTS)
def test_release_names_that_yaml_reads_as_something_else(chart: str, release: str) -> None:
    """`n` is false and `1e3` a number to a YAML 1.1 parser: labels are quoted, and names begin with a letter."""
    objects = render(chart, *FULL[chart], release=release)
    check(objects)
    for each in objects:
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == release
        assert all(isinstance(value, str) for value in labels.values())
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", each["metadata"]["name"])
    # The strings themselves: PyYAML reads `n` as a string, the API server does not.
    bare = [line for line in text(chart, FULL[chart], "", release).splitlines() if re.search(rf": {release}$", line)]
    assert not bare


@pytest.mark.parametrize("chart", SERVICES)
def test_selectors_find_the_pods(chart: str) -> None:
    """What selects by labels (workloads, Services, disruption budgets, monitors, policies) selects pods of its own release."""
    objects = render(chart, *FULL[chart])
    templates = [(name, pod["metadata"]["labels"]) for name, pod in pods(objects)]
    selectors = [
        each["spec"]["selector"].get("matchLabels", each["spec"]["selector"])
        for each in of_kind(objects, "Service", "PodDisruptionBudget", "PodMonitor", "Deployment", "StatefulSet", "DaemonSet")]
    selectors += [each["spec"]["podSelector"]["matchLabels"] for each in of_kind(objects, "NetworkPolicy")]
    for selector in selectors:
        assert [name for name, labels in templates if selector.items() <= labels.items()], selector
    for each in of_kind(objects, "Deployment"):
        assert each["spec"]["selector"]["matchLabels"].items() <= each["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("chart", CHARTS)
def test_typos_are_refused(chart: str) -> None:
    """At the top and further down, each by name: a setting that does nothing is worse than an error."""
    apart = {
        "cluster": ("clusterNam=x", "pools.cpu.limit=1"),
        "monitoring": ("rulse=x", "rules.label=x", "dashboards.enabeld=true")}
    typos = apart.get(chart, ("replicsa=2", "pdb.enabeld=true", "image.tga=x"))
    with pytest.raises(Refused) as refused:
        text(chart, typos)
    for typo in typos:
        assert f"additional properties '{typo.partition('=')[0].rpartition('.')[2]}' not allowed" in str(refused.value)


@pytest.mark.parametrize("chart", CHARTS)
def test_a_chart_may_be_a_subchart(chart: str) -> None:
    """Helm hands `global` and a condition `enabled` to subcharts: strict schemas that refuse them break their users."""
    assert render(chart, "global.registry=x", "enabled=true") == render(chart)


@pytest.mark.parametrize(("chart", "values", "sentence"), [
    ("buffer", ("redis.secretName=",), "redis: set secretName"),
    ("buffer", ("redis.secretName=", "redis.url=redis://user:password@host:6379"), "redis.url|/redis/url"),
    ("rollout", ("drain.graceSeconds=600",), "graceSeconds"),
    ("trainer", ("gpus=4", "processesPerNode=8"), "exceeds gpus"),
    ("reward", ("buffer.address=buffer",), "address"),
    ("cluster", ("amiAlias=al2023@latest",), "amiAlias"),
    ("cluster", ("pools.trainer.enabled=true",), "without instanceTypes"),
])
def test_contradictions_are_refused(chart: str, values: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        text(chart, values)


@pytest.mark.parametrize("chart", SERVICES)
def test_everything_kubernetes_knows_can_be_set(chart: str) -> None:
    """Nobody has to fork a chart for a toleration: each of these reaches every pod of the service, or the object it is for."""
    objects = render(chart, preset=str(EVERYTHING))
    check(objects)
    for _, pod in pods(objects):
        spec, container = pod["spec"], main_container(pod)
        assert spec["tolerations"] == [{"key": "spot"}]
        assert spec["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0]["weight"] == 3
        assert {"name": "RUST_LOG", "value": "info"} in container["env"]
        assert container["livenessProbe"]["periodSeconds"] == 77 and container["livenessProbe"]["grpc"]
        assert pod["metadata"]["annotations"]["team"] == "rl" and pod["metadata"]["labels"]["cost"] == "rl"
        assert spec["nodeSelector"] == {"pool": "x"} and spec["priorityClassName"] == "high"
        assert spec["runtimeClassName"] == "nvidia" and spec["topologySpreadConstraints"][0]["maxSkew"] == 1
        assert spec["imagePullSecrets"] == [{"name": "pull"}] and spec["initContainers"][0]["name"] == "fetch"
        assert {"name": "models", "mountPath": "/models"} in container["volumeMounts"]
        assert container["resources"]["limits"]["memory"] == "9Gi" and container["envFrom"]
        assert {"name": "work", "persistentVolumeClaim": {"claimName": "work"}} in spec["volumes"]
        assert spec["securityContext"]["fsGroup"] == 7 and spec["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["privileged"] is False
    account, = of_kind(objects, "ServiceAccount")
    assert account["metadata"]["annotations"] == {"role": "arn"} and account["metadata"]["labels"]["cost"] == "rl"
    assert [each["metadata"]["name"] for each in of_kind(objects, "ConfigMap")] == [f"{chart}-x"]
    workload = of_kind(objects, "Deployment")[0]
    assert workload["metadata"]["annotations"] == {"owner": "me"}


@pytest.mark.parametrize(("chart", "kind"), [
    ("buffer", "StatefulSet"), ("rollout", "DaemonSet"), ("rollout", "LeaderWorkerSet"), ("trainer", "LeaderWorkerSet")])
def test_whatever_a_chart_starts_is_placed_as_its_service(chart: str, kind: str) -> None:
    """The small Redis, the image puller, and groups of several nodes, too: where all nodes are tainted they would wait."""
    found = [pod["spec"] for _, pod in pods(of_kind(render(chart, *FULL[chart], preset=str(EVERYTHING)), kind))]
    assert found
    for spec in found:
        assert spec["tolerations"] == [{"key": "spot"}] and spec["nodeSelector"] == {"pool": "x"}
        assert spec["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0]["weight"] == 3
        assert spec["priorityClassName"] == "high" and spec["imagePullSecrets"] == [{"name": "pull"}]


@pytest.mark.parametrize("chart", SERVICES)
def test_schema_and_values_name_the_same_keys(chart: str) -> None:
    """What may be set is in values.yaml with its default, and the other way round."""
    values = yaml.safe_load((HELM / chart / "values.yaml").read_text())
    schema = json.loads((HELM / chart / "values.schema.json").read_text())
    assert set(schema["properties"]) - set(values) == {"global", "enabled", "common"}
    assert not set(values) - set(schema["properties"])


def test_schemas_are_generated() -> None:
    command = [sys.executable, str(ROOT / "tools/generate_chart_schemas.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout


@pytest.mark.parametrize("chart", CHARTS)
def test_charts_own_no_resource_definitions(chart: str) -> None:
    """CRDs of others are installed with their controllers: in a chart of ours they would never be upgraded."""
    assert not (HELM / chart / "crds").exists()
    assert not of_kind(render(chart, *FULL[chart]), "CustomResourceDefinition")
