"""Releases with the real helm on a stand-in API server: what an upgrade touches, what it leaves alone, and the way back."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.charts.api_server import Cluster, serving
from tests.charts.rendering import HELM, NEEDED, ROOT, SERVICES, TOOLS, Refused, environment, helm

Helm = Callable[..., str]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[Cluster, Helm]]:
    """An empty cluster, and helm on it."""
    with serving(tmp_path) as (found, config):
        env = environment(tmp_path / "home") | {"KUBECONFIG": str(config)}

        def run(verb: str, release: str, *words: str) -> str:
            return helm(verb, release, *words, "-n", "runs", env=env)

        yield found, run


def install(run: Helm, chart: str, *values: str, release: str = "") -> str:
    sets = [part for value in (*NEEDED.get(chart, ()), *values) for part in ("--set", value)]
    return run("upgrade", release or chart, "--install", str(HELM / chart), *sets)


def test_one_service_is_upgraded_and_rolled_back_and_nobody_else_notices(cluster: tuple[Cluster, Helm]) -> None:
    """Five releases in one namespace; an upgrade of the reward workers writes objects of theirs only, a rollback undoes it."""
    api, run = cluster
    for service in SERVICES:
        assert "deployed" in install(run, service)
    before = {key: each["metadata"]["resourceVersion"] for key, each in api.objects.items() if each["kind"] != "Secret"}
    api.writes.clear()
    install(run, "reward", "image.tag=v2", "replicas=3")
    reward = api.find("Deployment", "reward")
    assert reward["spec"]["replicas"] == 3
    assert reward["spec"]["template"]["spec"]["containers"][0]["image"] == "slipstream-reward:v2"
    assert {name for _, kind, name in api.writes if kind != "Secret"} == {"reward"}
    for key, version in before.items():
        if key[3] != "reward":
            assert api.objects[key]["metadata"]["resourceVersion"] == version
    assert len(run("history", "reward").splitlines()) == 3
    run("rollback", "reward", "1")
    reward = api.find("Deployment", "reward")
    assert reward["spec"]["replicas"] == 1
    assert reward["spec"]["template"]["spec"]["containers"][0]["image"] == "slipstream-reward:0.1.0"


def test_an_upgrade_keeps_what_an_autoscaler_set(cluster: tuple[Cluster, Helm]) -> None:
    """Without rendered replicas an upgrade leaves nine workers alone; with them it is a conflict: the reason for the rule."""
    api, run = cluster
    install(run, "rollout", "autoscaling.enabled=true")
    api.scale("Deployment", "rollout", 9)
    install(run, "rollout", "autoscaling.enabled=true", "image.tag=v2")
    rollout = api.find("Deployment", "rollout")
    assert rollout["spec"]["replicas"] == 9
    assert rollout["spec"]["template"]["spec"]["containers"][0]["image"] == "slipstream-rollout:v2"
    with pytest.raises(Refused, match=r"conflict.*\.spec\.replicas"):
        install(run, "rollout", "image.tag=v3")
    assert api.find("Deployment", "rollout")["spec"]["replicas"] == 9


def test_a_refused_value_changes_nothing(cluster: tuple[Cluster, Helm]) -> None:
    api, run = cluster
    install(run, "trainer")
    api.writes.clear()
    with pytest.raises(Refused, match="graceSeconds"):
        install(run, "trainer", "drain.graceSeconds=5")
    assert not api.writes
    generation = api.find("Deployment", "trainer")["metadata"]["generation"]
    with pytest.raises(Refused, match="nonsense"):  # the chart takes any affinity, the API server does not
        install(run, "trainer", "affinity.nonsense=1")
    assert api.find("Deployment", "trainer")["metadata"]["generation"] == generation
    assert "failed" in run("history", "trainer")


def test_upgrades_of_engines_keep_the_floor_up(cluster: tuple[Cluster, Helm]) -> None:
    """Spot engines and the on-demand floor are two workloads: a replaced template rolls both, a new floor size only one."""
    api, run = cluster
    values = ("autoscaling.enabled=true", "spot.preferred=true")
    install(run, "rollout", *values, "spot.onDemandReplicas=1")
    first = api.find("Deployment", "rollout")["metadata"]["generation"]
    install(run, "rollout", *values, "spot.onDemandReplicas=2")
    assert api.find("Deployment", "rollout-floor")["spec"]["replicas"] == 2
    assert api.find("Deployment", "rollout")["metadata"]["generation"] == first
    terms = api.find("Deployment", "rollout-floor")["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    assert terms["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0]["matchExpressions"] == [
        {"key": "karpenter.sh/capacity-type", "operator": "NotIn", "values": ["spot"]}]


def test_the_commands_of_the_guides_run(tmp_path: Path) -> None:
    """As they stand on the page, by a shell: what is applied, upgraded and looked at. What needs pods, or an object that was
    made before, is left out by name; the install of docs/eks.md is rendered elsewhere."""
    pages = [(ROOT / "docs" / name).read_text() for name in ("guides/operations.md", "eks.md")]
    lines = [line.strip().partition(" #")[0] for page in pages for line in page.replace("\\\n", " ").splitlines()]
    lines = [line.replace("$NS", "runs") for line in lines if line.startswith(("kubectl ", "helm upgrade --install"))]
    left_out = re.compile(r" (exec|logs|cp|secret|namespace|label) |create configmap (?!.*dry-run)|<|\$R|clusterName")
    lines = [line for line in lines if not left_out.search(line)]
    with serving(tmp_path) as (api, config):
        env = environment(tmp_path / "home") | {"KUBECONFIG": str(config), "PATH": f"{TOOLS}:{os.environ['PATH']}"}
        (tmp_path / "run.toml").write_text("[run]")
        (tmp_path / "helm").symlink_to(HELM)
        for line in lines:
            for service in (["buffer", "reward", "rollout", "trainer"] if "$service" in line else [""]):
                words = line.replace("$service", service).partition("--wait")[0]
                files = "--set redis.secretName=redis" if "helm/buffer" in words else ""
                done = subprocess.run(["bash", "-euo", "pipefail", "-c", words], cwd=tmp_path, env=env | {"FILES": files},
                                      capture_output=True, text=True, check=False, timeout=60)
                assert not done.returncode, (words, done.stderr)
        assert api.find("ConfigMap", "run")["data"] == {"run.toml": "[run]"}
        for service in ("buffer", "reward", "rollout", "trainer"):
            pod = api.find("Deployment", service)["spec"]["template"]
            assert pod["spec"]["containers"][0]["image"] == f"slipstream-{service}:0.1.0"
        assert len([line for line in lines if line.startswith("kubectl")]) >= 5


@pytest.mark.parametrize("release", ["n", "on", "1e3"])
def test_odd_release_names_install(cluster: tuple[Cluster, Helm], release: str) -> None:
    api, run = cluster
    install(run, "buffer", "redis.dev.enabled=true", release=release)
    service = api.find("Service", f"buffer-{release}")
    assert service["spec"]["selector"]["app.kubernetes.io/instance"] == release
    run("uninstall", release)
    assert not [each for each in api.objects.values() if each["kind"] != "Secret"]


def test_the_notes_say_what_to_look_at(cluster: tuple[Cluster, Helm]) -> None:
    """After an install: where to look, and what is not there yet."""
    _, run = cluster
    assert "slipstream ledger" in install(run, "buffer", "redis.dev.enabled=true")
    assert "kubectl -n runs create configmap run" in install(run, "reward")
    assert "slipstream_buffer_wanted_samples" in install(run, "rollout", "autoscaling.enabled=true")
    assert "Not yet run on a cluster" in install(run, "trainer", "nodes=2")
    assert 'address = "environment:50051"' in install(run, "environment")
    assert "Not this chart's" in install(run, "cluster")
