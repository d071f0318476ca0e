"""Trainer groups, engines and the nodes under them: EFA, ranks, placement, who lands where, and what each role may do in S3."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from services.trainer.parallel.fabric import INSTANCES, preset
from tests.charts.rendering import HELM, PRESETS, ROOT, Manifest, main_container, of_kind, pods, render

FABRIC = [name for chart, name in PRESETS if chart == "trainer" and name.startswith("p")]
POOLS = {chart: [name for other, name in PRESETS if other == chart and name != "dev"] for chart in ("rollout", "trainer")}
# Words with a slash in the code that are no folder of the object store.
NO_KEYS = {"order", "task", "warmup", "ready", "runs", "process", "stacks"}


def instance_type(pod: Manifest) -> str:
    return pod["spec"]["nodeSelector"]["node.kubernetes.io/instance-type"]


@pytest.mark.parametrize("name", FABRIC)
def test_a_trainer_pod_takes_its_whole_node(name: str) -> None:
    """Every GPU and EFA device of the instance type, huge pages, shared memory, and the variables that the code asks for."""
    for _, pod in pods(of_kind(render("trainer", preset=name), "LeaderWorkerSet")):
        container, node = main_container(pod), INSTANCES[instance_type(pod)]
        for side in ("requests", "limits"):
            assert container["resources"][side]["vpc.amazonaws.com/efa"] == str(node.adapters)
            assert container["resources"][side]["nvidia.com/gpu"] == str(node.gpus)
            assert container["resources"][side]["hugepages-2Mi"] == "5120Mi"
        env = {each["name"]: each.get("value") for each in container["env"]}
        assert env.items() >= preset(instance_type(pod)).items()
        shm, = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm"]
        assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "200Gi"}
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert f"--nproc-per-node={node.gpus}" in container["command"]


def test_the_group_starts_stops_and_restarts_as_one() -> None:
    """torchrun meets at the leader and restarts nothing itself; only rank 0's pod is probed; all nodes share a zone."""
    group, = of_kind(render("trainer", preset="p5en"), "LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    assert (group["spec"]["replicas"], template["size"], template["restartPolicy"]) == (1, 2, "RecreateGroupOnPodRestart")
    leader, worker = (main_container(template[part]) for part in ("leaderTemplate", "workerTemplate"))
    assert leader["command"] == worker["command"] and leader["args"] == worker["args"]
    assert leader["command"][:5] == [
        "torchrun", "--nnodes=$(LWS_GROUP_SIZE)", "--node-rank=$(LWS_WORKER_INDEX)", "--master-addr=$(LWS_LEADER_ADDRESS)",
        "--master-port=29500"]
    assert "--max-restarts=0" in leader["command"] and leader["command"][-2:] == ["-m", "services.trainer"]
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(leader) and "livenessProbe" not in worker
    env = {each["name"]: each.get("value") for each in leader["env"]}
    grace = template["leaderTemplate"]["spec"]["terminationGracePeriodSeconds"]
    assert grace - 30 < int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace
    zone, = template["workerTemplate"]["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert zone["topologyKey"] == "topology.kubernetes.io/zone"
    assert zone["labelSelector"]["matchLabels"].items() <= template["leaderTemplate"]["metadata"]["labels"].items()
    policy, = of_kind(render("trainer", preset="p5en"), "NetworkPolicy")
    peers = {"podSelector": {"matchLabels": zone["labelSelector"]["matchLabels"]}}
    assert {"from": [peers]} in policy["spec"]["ingress"] and {"to": [peers]} in policy["spec"]["egress"]


def test_one_trainer_at_a_time() -> None:
    """A second one would fence the first: a single pod is replaced after it is gone, and a paused run has none."""
    one, = of_kind(render("trainer"), "Deployment")
    assert one["spec"]["strategy"] == {"type": "Recreate"} and one["spec"]["replicas"] == 1
    assert main_container(one["spec"]["template"])["command"] == ["python", "-m", "services.trainer"]
    paused, = of_kind(render("trainer", "running=false"), "Deployment")
    assert paused["spec"]["replicas"] == 0
    node, = of_kind(render("trainer", "processesPerNode=4"), "Deployment")
    assert main_container(node["spec"]["template"])["command"][:3] == ["torchrun", "--standalone", "--nproc-per-node=4"]
    queued, = of_kind(render("trainer", "kueue.queueName=team", preset="p5"), "LeaderWorkerSet")
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"


def test_large_engines_are_groups_and_small_ones_are_pods() -> None:
    """nodes > 1 makes a LeaderWorkerSet: the leader is the service, the pods behind it follow it, or run what you say, and KEDA
    scales groups. They fail together and reach each other on every port."""
    values = ("nodes=2", "autoscaling.enabled=true", "spot.onDemandReplicas=1")
    elastic, _ = of_kind(objects := render("rollout", *values), "LeaderWorkerSet")
    member = main_container(elastic["spec"]["leaderWorkerTemplate"]["workerTemplate"])
    assert member["command"] == ["python3", "-m", "services.rollout.member"] and "readinessProbe" in member
    assert elastic["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    policy, = of_kind(objects, "NetworkPolicy")
    assert {"podSelector": {"matchLabels": policy["spec"]["podSelector"]["matchLabels"]}} in [
        peer for rule in policy["spec"]["egress"] if "ports" not in rule for peer in rule["to"]]
    objects = render("rollout", *values, "workerCommand={follow}")
    elastic, floor = of_kind(objects, "LeaderWorkerSet")
    assert not of_kind(objects, "Deployment")
    leader, worker = (main_container(elastic["spec"]["leaderWorkerTemplate"][p]) for p in ("leaderTemplate", "workerTemplate"))
    assert "--run-file" in leader["args"] and worker["command"] == ["follow"] and "args" not in worker
    assert "replicas" not in elastic["spec"] and floor["spec"]["replicas"] == 1
    scaled, = of_kind(objects, "ScaledObject")
    assert scaled["spec"]["scaleTargetRef"]["kind"] == "LeaderWorkerSet"


def test_spot_first_with_an_on_demand_floor() -> None:
    """Two workloads that do not select each other's pods: one prefers Spot, the other never lands there."""
    elastic, floor = of_kind(render("rollout", preset="g6e"), "Deployment")
    wish, = elastic["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    spot = {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["spot"]}
    assert wish["preference"]["matchExpressions"] == [spot]
    assert "requiredDuringSchedulingIgnoredDuringExecution" in floor["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    for one, other in ((elastic, floor), (floor, elastic)):
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert not other["spec"]["selector"]["matchLabels"].items() <= labels.items()


def requirements(pool: Manifest) -> dict[str, list[str]]:
    return {each["key"]: each.get("values", []) for each in pool["spec"]["template"]["spec"]["requirements"]}


@pytest.mark.parametrize(("chart", "name"), [(chart, name) for chart, names in POOLS.items() for name in names])
def test_pods_find_a_pool(chart: str, name: str) -> None:
    """What a GPU preset selects is what the cluster's preset of that name buys: pool, instance type, taints."""
    pools = {each["spec"]["template"]["metadata"]["labels"]["slipstream/pool"]: each
             for each in of_kind(render("cluster", preset=name), "NodePool")}
    for _, pod in pods(of_kind(render(chart, preset=name), "Deployment", "LeaderWorkerSet")):
        pool = pools[pod["spec"]["nodeSelector"]["slipstream/pool"]]
        bought = requirements(pool)["node.kubernetes.io/instance-type"]
        wanted = pod["spec"]["nodeSelector"].get("node.kubernetes.io/instance-type")
        family = pod["spec"]["nodeSelector"].get("karpenter.k8s.aws/instance-family", "")
        assert wanted in bought if wanted else all(each.startswith(f"{family}.") for each in bought)
        tolerated = {each["key"] for each in pod["spec"]["tolerations"]}
        assert {taint["key"] for taint in pool["spec"]["template"]["spec"]["taints"]} <= tolerated
        kinds = requirements(pool)["karpenter.sh/capacity-type"]
        assert "spot" in kinds if chart == "rollout" else "spot" not in kinds


@pytest.mark.parametrize("chart", ["buffer", "reward", "environment"])
def test_services_without_a_gpu_find_a_pool(chart: str) -> None:
    pools = {each["spec"]["template"]["metadata"]["labels"]["slipstream/pool"]: each["spec"]["template"]["spec"]
             for each in of_kind(render("cluster"), "NodePool")}
    for _, pod in pods(of_kind(render(chart, preset="eks"), "Deployment")):
        assert "taints" not in pools[pod["spec"]["nodeSelector"]["slipstream/pool"]]


def test_fabric_nodes_are_prepared_at_boot() -> None:
    """Registered memory without a limit and huge pages, before the kubelet starts; local NVMe as ephemeral storage."""
    values = (
        "pools.trainer.placementGroup=fabric", "pools.trainer.capacityReservations[0].id=cr-0123", "efaSecurityGroups={sg-01}")
    objects = render("cluster", *values, preset="p5en")
    classes = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "EC2NodeClass")}
    trainer = classes["slipstream-trainer"]
    assert "LimitMEMLOCK=infinity" in trainer["userData"] and trainer["instanceStorePolicy"] == "RAID0"
    pages, = re.findall(r"vm.nr_hugepages=(\d+)", trainer["userData"])
    assert int(pages) * 2 >= 5120
    assert trainer["placementGroupSelector"] == {"name": "fabric"}
    assert trainer["capacityReservationSelectorTerms"] == [{"id": "cr-0123"}]
    assert {"id": "sg-01"} in trainer["securityGroupSelectorTerms"]
    cpu = classes["slipstream-cpu"]
    assert {"id": "sg-01"} not in cpu["securityGroupSelectorTerms"] and "userData" not in cpu


def test_a_namespace_begins_closed_and_with_an_authority() -> None:
    """Default deny, and an issuer of the name that the service charts ask for."""
    objects = render("cluster")
    policy, = of_kind(objects, "NetworkPolicy")
    assert policy["metadata"]["namespace"] == "runs"
    assert policy["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    asked, = {each["spec"]["issuerRef"]["name"] for each in of_kind(render("buffer"), "Certificate")}
    issuers = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Issuer")}
    authority, = of_kind(objects, "Certificate")
    assert issuers[asked] == {"ca": {"secretName": authority["spec"]["secretName"]}} and authority["spec"]["isCA"] is True


def allowed(role: str, action: str) -> set[str]:
    """First folders below the run's prefix on which a role may do this."""
    policy = json.loads((HELM / "cluster/iam" / f"{role}.json").read_text())
    return {
        resource.split("/PREFIX/")[1].split("/")[0] for statement in policy["Statement"] if action in statement["Action"]
        for resource in statement["Resource"] if "/PREFIX/" in resource}


def test_roles_in_s3_are_least_privilege() -> None:
    """Only the trainer writes versions, bases, checkpoints; nobody deletes from the batch log; reward workers need nothing."""
    assert allowed("trainer", "s3:PutObject") == {"versions", "files", "bases", "checkpoints", "probe"}
    assert allowed("rollout", "s3:GetObject") == {"versions", "files", "bases", "routes"}
    assert allowed("buffer", "s3:PutObject") == {"batches", "spill", "ledger", "probe"}
    assert allowed("buffer", "s3:DeleteObject") == {"spill", "ledger", "probe"}
    assert allowed("rollout", "s3:PutObject") == {"routes"} and not allowed("rollout", "s3:DeleteObject")
    assert allowed("trainer", "s3:GetObject") >= {"batches", "routes", "spill"}
    assert {path.stem for path in (HELM / "cluster/iam").glob("*.json")} == {
        "trainer", "buffer", "rollout", "bucket", "pod-identity-trust"}
    bucket = json.loads((HELM / "cluster/iam/bucket.json").read_text())
    denied = {r.split("/PREFIX/")[1] for s in bucket["Statement"] for r in s["Resource"] if "/PREFIX/" in r}
    assert denied == {f"{folder}/*" for folder in allowed("trainer", "s3:PutObject") - {"probe"}}


def test_every_folder_that_the_code_writes_to_is_in_a_policy() -> None:
    """A key whose first folder no role may write works on a laptop and is refused in S3."""
    named = {
        folder for package in ("slipstream", "services") for path in (ROOT / package).rglob("*.py")
        for folder in re.findall(r'f?"([a-z]+)/(?:"|\{|<)', path.read_text())}
    written = {folder for role in ("trainer", "buffer", "rollout") for folder in allowed(role, "s3:PutObject")}
    assert named - NO_KEYS == written, "a folder of the object store that no policy knows, or a word for NO_KEYS"


def test_pools_in_values_have_limits() -> None:
    """A pool without a limit buys what a bug asks for."""
    for pool in yaml.safe_load((HELM / "cluster/values.yaml").read_text())["pools"].values():
        assert pool["limits"]
