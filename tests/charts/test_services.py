"""Charts and code say the same: flags, ports, metrics, roles, certificates, and how long a stop takes."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import typer.main
from prometheus_client import CollectorRegistry

from services.rollout.worker import DRAIN_S
from services.trainer.loop import STOP_S
from slipstream import auth, rpc, telemetry, tls
from slipstream.cli.commands import app
from slipstream.cli.processes import Limits
from slipstream.lifecycle import Lifecycle
from slipstream.service_command import arguments
from tests.charts.rendering import (
    PRESETS,
    ROOT,
    SERVICES,
    Manifest,
    main_container,
    of_kind,
    pods,
    render,
)
from tests.charts.test_valid import FULL

RUN = ROOT / "examples/sort-digits/run.toml"
OWN = [service for service in SERVICES if service != "environment"]
SPOT_NOTICE_S = 120
# What KEDA's Prometheus scaler knows. Its CRD takes any key here, so a typo would be a scaler that does something else.
PROMETHEUS_TRIGGER = {
    "serverAddress", "query", "threshold", "activationThreshold", "ignoreNullValues", "namespace", "customHeaders", "authModes",
    "unsafeSsl", "timeout", "queryParameters"}


def options(container: Manifest) -> dict[str, str]:
    """`--name value` pairs of a container's arguments."""
    words = container.get("args", [])
    return {word: after for word, after in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


@pytest.mark.parametrize("service", OWN)
def test_the_service_understands_its_arguments(service: str) -> None:
    """The rendered command line goes through the service's own parser."""
    objects = render(service, *FULL[service], *(("redis.secretName=",) if service == "buffer" else ()))
    for name, pod in pods(objects):
        container = main_container(pod)
        if container["name"] != service:
            continue
        words = [str(RUN) if word == "/etc/slipstream/run/run.toml" else word for word in container["args"]]
        if "services.rollout.member" in container.get("command", ()):  # its own two options come last
            assert words[-4:] == ["--leader", "$(LWS_LEADER_ADDRESS):50051", "--node", "$(LWS_WORKER_INDEX)"]
            words = words[:-4]
        parsed = arguments(service, words)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert (parsed.port, parsed.metrics_port) == (ports["grpc"], ports["metrics"]), name
        assert (parsed.health_port, parsed.client_port) == (ports["health"], ports.get("client", 0))
        assert parsed.tls_dir == "/etc/slipstream/tls" and parsed.host == "0.0.0.0"
        assert parsed.stay == (service == "trainer")
        if service != "buffer":
            assert parsed.buffer == "buffer:50051"


def test_a_redis_url_is_read_from_a_file(tmp_path: Path) -> None:
    """A password on a command line is in every list of processes: the chart mounts a Secret and passes its path."""
    container = main_container(next(pod for _, pod in pods(render("buffer"))))
    path = Path(options(container)["--redis-file"])
    assert str(path.parent) in [mount["mountPath"] for mount in container["volumeMounts"]]
    (tmp_path / "url").write_text("rediss://user:secret@host:6380/0\n")
    words = ["--run-file", str(RUN), "--redis-file", str(tmp_path / "url")]
    assert arguments("buffer", words).redis == "rediss://user:secret@host:6380/0"


def test_the_environment_server_understands_its_arguments() -> None:
    """`slipstream env serve` is asked the way a shell would ask it."""
    container = main_container(next(pod for _, pod in pods(render("environment", "arguments.digits=4000000"))))
    assert container["command"] == ["slipstream", "env", "serve"]
    serve = typer.main.get_command(app).commands["env"].commands["serve"]  # pyright: ignore[reportAttributeAccessIssue]
    given = serve.make_context("serve", list(container["args"])).params
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (given["port"], given["metrics_port"], given["health_port"]) == (ports["grpc"], ports["metrics"], ports["health"])
    assert given["arg"] == ["digits=4000000"] and given["tls_dir"] == "/etc/slipstream/tls" and not given["insecure"]
    container = main_container(next(pod for _, pod in pods(render("environment", "tls.enabled=false", "logContent=true"))))
    given = serve.make_context("serve", list(container["args"])).params
    assert given["insecure"] and given["log_content"]  # plaintext off loopback has to be meant, and with tls off it is


def stop_takes_s(service: str) -> float:
    """The longest that a stop of this service takes when nothing has to be forced, from the code's own constants."""
    stage = inspect.signature(Lifecycle).parameters["stage_timeout_s"].default
    calls = inspect.signature(rpc.Server).parameters["grace_s"].default
    return {
        "buffer": calls + stage,  # calls in flight, then the ledger's last state
        "rollout": max(DRAIN_S, stage) + calls,  # samples in flight, the last submit
        "reward": stage + calls,  # samples in hand
        "trainer": stage + STOP_S + calls,  # the step in flight, its checkpoint
        "environment": calls,
    }[service]


@pytest.mark.parametrize("service", SERVICES)
def test_pods_have_the_time_that_a_stop_takes(service: str) -> None:
    """terminationGracePeriodSeconds covers preStop and the service's own stages; engines are gone before a Spot node is."""
    presets = [preset for chart, preset in PRESETS if chart == service]
    for preset in ("", *presets):
        for name, pod in pods(of_kind(render(service, preset=preset), "Deployment", "LeaderWorkerSet")):
            waits = main_container(pod).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            grace = pod["spec"]["terminationGracePeriodSeconds"]
            assert grace >= waits + stop_takes_s(service), name
            assert grace >= waits + Limits().drain_s.get(service, 0), name
            if service == "rollout":
                assert grace < SPOT_NOTICE_S


def product_metrics() -> dict[str, set[str]]:
    """Every series name that the product exports, with its labels."""
    found: dict[str, set[str]] = {}
    for group in ("Buffer", "Rollout", "Reward", "Trainer", "Environment"):
        registry = CollectorRegistry()
        getattr(telemetry, f"{group}Metrics")(registry)
        for collector in registry._collector_to_names:
            for name in registry._collector_to_names[collector]:
                found[name] = set(collector._labelnames)  # pyright: ignore[reportAttributeAccessIssue]
    return found


@pytest.mark.parametrize("service", ["rollout", "reward", "environment"])
def test_scaling_queries_use_metrics_that_exist(service: str) -> None:
    """Each metric is one that the product exports, each label its own or one that the PodMonitor puts on."""
    known, series = product_metrics(), 0
    for scaled in of_kind(render(service, *FULL[service]), "ScaledObject"):
        for trigger in scaled["spec"]["triggers"]:
            assert set(trigger["metadata"]) <= PROMETHEUS_TRIGGER
            assert trigger["metadata"]["ignoreNullValues"] == "false"  # no answer is an error, not 0
            assert all(isinstance(value, str) for value in trigger["metadata"].values())
            for name, labels in re.findall(r"(slipstream_\w+)\{([^}]*)\}", trigger["metadata"]["query"]):
                assert name in known, name
                used = set(re.findall(r"(\w+)=", labels))
                assert used <= known[name] | {"namespace", "run", "job", "tier"}
                assert {"namespace", "run"} <= used
                series += 1
        target, = [each for each in of_kind(render(service, *FULL[service]), scaled["spec"]["scaleTargetRef"]["kind"])
                   if each["metadata"]["name"] == scaled["spec"]["scaleTargetRef"]["name"]]
        assert target["apiVersion"] == scaled["spec"]["scaleTargetRef"]["apiVersion"]
    assert series


def test_an_empty_buffer_asks_for_more_rollouts() -> None:
    """The signal is work to generate, which an empty buffer has most of: it is read as it is, not inverted, less the floor."""
    scaled, = of_kind(render("rollout", "autoscaling.enabled=true", "spot.onDemandReplicas=2"), "ScaledObject")
    trigger, = scaled["spec"]["triggers"]
    assert trigger["metadata"]["query"] == (
        'clamp_min(max(slipstream_buffer_wanted_samples{namespace="runs",run="run"}) - 512, 0)')
    assert trigger["metadata"]["threshold"] == "256" and trigger["metricType"] == "AverageValue"


@pytest.mark.parametrize("service", ["rollout", "reward", "environment"])
def test_no_replicas_while_something_else_scales(service: str) -> None:
    """Rendered replicas make the next upgrade fail, or throw the autoscaler's away (both seen on a real API server)."""
    name = service
    for values, there in (((), True), (("autoscaling.enabled=true",), False)):
        workload, = [each for each in of_kind(render(service, *values), "Deployment") if each["metadata"]["name"] == name]
        assert ("replicas" in workload["spec"]) == there


def test_the_run_is_what_separates_two_runs_in_one_namespace() -> None:
    """Series, network policies and pods carry the run's name, so that two runs do not scale or reach each other."""
    first, second = (render("rollout", *FULL["rollout"], f"run.name={run}") for run in ("one", "two"))
    for objects, run, other in ((first, "one", "two"), (second, "two", "one")):
        text = str(of_kind(objects, "ScaledObject", "NetworkPolicy", "PodMonitor"))
        assert f'run="{run}"' in text and f"'slipstream/run': '{run}'" in text and other not in re.findall(r"\w+", text)


@pytest.mark.parametrize("service", SERVICES)
def test_pods_are_restricted(service: str) -> None:
    """The restricted Pod Security Standard, a read-only root, no token of the API server, no secret in the environment."""
    for name, pod in pods(render(service, *FULL[service])):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        for volume in spec.get("volumes", []):
            assert set(volume) - {"name"} <= {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False and security["readOnlyRootFilesystem"] is True, name
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not [e for e in container.get("env", []) if "secretKeyRef" in e.get("valueFrom", {})]
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("service", SERVICES)
def test_network_policies_follow_the_table_of_roles(service: str) -> None:
    """Nothing in or out but what is listed; the gRPC port is open to the roles that may call this service, and to no others."""
    objects = render(service)
    policy, = [each for each in of_kind(objects, "NetworkPolicy") if each["metadata"]["name"] == service]
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    grpc = [{"port": 50051, "protocol": "TCP"}]
    callers = {
        role for rule in policy["spec"]["ingress"] if rule.get("ports") == grpc
        for peer in rule["from"] for match in peer["podSelector"]["matchExpressions"] for role in match["values"]}
    may = {
        role for method, roles in auth.ALLOWED.items() if method.startswith(f"slipstream.{service}.v1.") for role in roles}
    assert callers - {"client"} <= may
    if service in ("buffer", "environment"):  # the others are called by people and programs outside alone
        assert callers == may - {"cli", service}
    called = [
        peer.get("podSelector", {}).get("matchLabels", {}).get("slipstream/role")
        for rule in policy["spec"]["egress"] for peer in rule.get("to", [])]
    assert ("buffer" in called) == (service in ("rollout", "reward", "trainer"))


@pytest.mark.parametrize("service", SERVICES)
def test_certificates_name_the_role_as_the_code_reads_it(service: str) -> None:
    certificate, = of_kind(render(service), "Certificate")
    spec = certificate["spec"]
    uris = {"peer_uri": [uri.encode() for uri in spec["uris"]]}
    assert tls.role_of(uris, "any-run") == service and tls.server_name(service) in spec["dnsNames"]
    assert {"server auth", "client auth"} <= set(spec["usages"])
    pod = next(pod for _, pod in pods(render(service)))
    secret, = [volume["secret"] for volume in pod["spec"]["volumes"] if volume["name"] == "tls"]
    assert secret["secretName"] == spec["secretName"] and secret["defaultMode"] & 0o007 == 0
    assert not of_kind(render(service, "tls.issuer.name="), "Certificate")  # bring the Secret yourself


@pytest.mark.parametrize("service", SERVICES)
def test_probes_ask_the_port_that_answers_in_plaintext(service: str) -> None:
    """The kubelet knows no client certificates: with TLS it asks the port that serves health alone."""
    for values, port in (((), 50052), (("tls.enabled=false",), 50051)):
        container = main_container(next(pod for _, pod in pods(of_kind(render(service, *values), "Deployment"))))
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[kind]["grpc"] == {"port": port}
        assert port in [each["containerPort"] for each in container["ports"]]
