"""The commands of docs/eks.md are run as far as they go without a cluster: every helm command renders, every file exists."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import yaml

from slipstream import config
from tests.charts.rendering import CHARTS, HELM, ROOT, faults, helm

TEXT = (ROOT / "docs/eks.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.S)
SHELL = "\n".join(body for kind, body in BLOCKS if kind == "bash").replace("\\\n", " ")
OPERATIONS = (ROOT / "docs/guides/operations.md").read_text().partition("## On a cluster")[2]
VARIABLES = {"CLUSTER": "demo", "NS": "runs", "SG": "sg-0123", "ZONE": "us-east-1a", "BUCKET": "b", "PREFIX": "demo",
             "ACCOUNT": "123456789012", "ADMIN": "Admin", "FILES": "--set redis.secretName=redis",
             "R": re.sub(r"<[\w -]+>", "registry", re.findall(r'^R="(.*?)"', SHELL, re.M)[0])}


def filled(text: str) -> str:
    text = re.sub(r"<[\w -]+>", "registry", text)
    return re.sub(r"\$(\w+)", lambda m: VARIABLES[m[1]], text)


def commands() -> list[list[str]]:
    """Every `helm upgrade --install` of the page as words, variables filled in."""
    lines = [line.partition(" #")[0] for line in SHELL.splitlines() if line.startswith("helm upgrade --install")]
    return [shlex.split(filled(line)) for line in lines]


def test_every_helm_command_renders_what_an_api_server_takes(tmp_path: Path) -> None:
    """With the presets, values and files of the page; each chart is installed by it."""
    model = re.search(r"model\.yaml <<YAML\n(.*?)\nYAML", SHELL, re.S)
    assert model
    (tmp_path / "model.yaml").write_text(filled(model[1]))
    seen = set()
    for words in commands():
        release, chart = words[3:5]
        places = {"model.yaml": tmp_path / "model.yaml"} | {word: ROOT / word for word in words if word.startswith("helm/")}
        rendered = helm("template", release, *[str(places.get(word, word)) for word in words[4:]])
        objects = [each for each in yaml.load_all(rendered, yaml.CSafeLoader) if each]
        found = [fault for each in objects for fault in faults(each)]
        assert not found, found
        monitors = [each["metadata"]["labels"].get("release") for each in objects if each["kind"] == "PodMonitor"]
        assert set(monitors) <= {"kube-prometheus-stack"}  # as its chart selects by default: without, KEDA sees no series
        seen.add(chart.removeprefix("helm/"))
    assert seen == set(CHARTS)


def test_the_run_file_of_the_page_is_one() -> None:
    """Its tables, put over the demo's, are accepted; ranks are those of the preset that the page installs."""
    toml, = [body for kind, body in BLOCKS if kind == "toml"]
    changes = tomllib.loads(toml)
    demo = tomllib.loads((ROOT / "examples/sort-digits/run.toml").read_text())
    for table, values in changes.items():
        demo[table] = values if table == "model" else {**demo.get(table, {}), **values}
    demo["algorithm"] = {"preset": "grpo"}
    run = config.parse(json.loads(json.dumps(demo)))
    preset = yaml.safe_load((HELM / "trainer/presets/p5en.yaml").read_text())
    assert run.trainer.parallel.ranks == preset["nodes"] * preset["processesPerNode"]
    assert run.trainer.parallel.instance_type == preset["nodeSelector"]["node.kubernetes.io/instance-type"]
    preset, vllm = yaml.safe_load((HELM / "rollout/presets/p5en.yaml").read_text()), run.rollout.vllm
    assert str(vllm.tensor_parallel * vllm.data_parallel) == preset["resources"]["limits"]["nvidia.com/gpu"]
    assert run.rollout.slots == preset["autoscaling"]["perReplica"]


def test_policies_are_filled_by_the_page() -> None:
    """The sed of the page leaves no placeholder behind, and the roles are those that have a policy."""
    script = re.search(r"fill\(\) \{ sed \"(.*?)\" helm/cluster/iam/\$1\.json; \}", SHELL)
    assert script
    for path in (HELM / "cluster/iam").glob("*.json"):
        text = path.read_text()
        for part in script[1].split(";"):
            _, old, new, *_ = part.strip().split("/")
            text = "\n".join(line.replace(old, filled(new), 1) for line in text.splitlines())
        assert not re.findall(r"\b(BUCKET|PREFIX|ACCOUNT|ADMIN)\b", text), path.name
        json.loads(text)
    roles = re.search(r"for role in ([\w ]+); do", SHELL)
    assert roles and {f"{role}.json" for role in roles[1].split()} < {path.name for path in (HELM / "cluster/iam").iterdir()}


def test_files_and_metrics_of_the_page_exist() -> None:
    from tests.charts.test_services import product_metrics
    for path in set(re.findall(r"(?:helm|docs|tests|examples|tools)/[\w./-]+\w", TEXT + OPERATIONS)):
        assert (ROOT / path).exists() or path == "tests/elastic/test_ep.py", path
    for name in set(re.findall(r"`(slipstream_\w+)`", TEXT + OPERATIONS)):
        assert name in product_metrics() or f"{name}_bucket" in product_metrics(), name


def test_the_operations_guide_names_values_that_exist() -> None:
    """Its helm commands render, and every value that its table tells to set is in the chart that it tells to set it in."""
    lines = [line.strip() for line in OPERATIONS.splitlines() if line.strip().startswith("helm upgrade --install")]
    loop, = [line for line in lines if "$service" in line]
    lines.remove(loop)
    services = re.search(r"for service in ([\w ]+); do", OPERATIONS)
    assert services and services[1].split() == ["buffer", "reward", "rollout", "trainer"]
    for chart in services[1].split():
        words = shlex.split(filled(loop.partition("||")[0].replace("$service", chart).replace(
            "$FILES", "$FILES" if chart == "buffer" else "")))
        assert ":0.1.0" in helm("template", *words[3:4], str(HELM / chart), *words[5:])
    for line in lines:
        chart = shlex.split(line)[4].removeprefix("helm/")
        values = filled(line.partition("runs")[2]) if chart == "buffer" else line.partition("$FILES")[2]
        assert "run-revision" in helm("template", chart, str(HELM / chart), *shlex.split(values))
    assert len(lines) == 4
    for chart, values in (("rollout", ("autoscaling.minReplicas=1", "replicas=3")), ("trainer", ("nodes=2", "running=false"))):
        for value in values:
            assert f"`{value.partition('=')[0]}" in OPERATIONS
            helm("template", chart, str(HELM / chart), "--set", value)
