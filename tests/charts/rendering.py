"""Charts as tests see them: rendered by the real helm, and judged by the schemas and rules of what they render."""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from cel import Context, compile  # type: ignore[import-not-found]

Manifest = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
HELM = ROOT / "helm"
SCHEMAS = Path(__file__).parent / "schemas"
TOOLS = Path(sys.prefix) / "chart-tools"
SERVICES = ("buffer", "reward", "rollout", "trainer", "environment")
CHARTS = (*SERVICES, "cluster", "monitoring")
KUBERNETES = "1.34.0"
# The least that must be said, by chart: there is no default for it.
NEEDED: dict[str, tuple[str, ...]] = {
    "buffer": ("redis.secretName=redis",), "cluster": ("clusterName=demo", "nodeRole=demo-node", "namespaces={runs}")}
PRESETS = tuple((path.parent.parent.name, path.stem) for path in sorted(HELM.glob("*/presets/*.yaml")))


class Refused(Exception):
    """What helm said when it refused."""


def environment(folder: Path | None = None) -> dict[str, str]:
    """Helm with its files in one place of our own and nothing of the user's."""
    home = str(folder or TOOLS / "home")
    return {**os.environ, "HELM_CACHE_HOME": home, "HELM_CONFIG_HOME": home, "HELM_DATA_HOME": home, "KUBECONFIG": os.devnull}


def helm(*arguments: str, env: dict[str, str] | None = None, timeout_s: float = 60) -> str:
    """Output of a helm command. Raises Refused with what it said."""
    done = subprocess.run(
        [str(TOOLS / "helm"), *arguments], capture_output=True, text=True, timeout=timeout_s, check=False,
        env=env or environment())
    if done.returncode:
        raise Refused(done.stderr)
    return done.stdout


@functools.cache
def text(chart: str, values: tuple[str, ...] = (), preset: str = "", release: str = "", namespace: str = "runs") -> str:
    path = Path(preset) if preset.endswith(".yaml") else HELM / chart / "presets" / f"{preset}.yaml"
    files = ("-f", str(path)) if preset else ()
    sets = [part for value in (*NEEDED.get(chart, ()), *values) for part in ("--set", value)]
    return helm("template", release or chart, str(HELM / chart), "-n", namespace, *files, *sets)


def render(chart: str, *values: str, preset: str = "", release: str = "") -> list[Manifest]:
    """The objects of a chart with `--set` values. Yours to change."""
    return copy.deepcopy(_parsed(chart, values, preset, release))


@functools.cache
def _parsed(chart: str, values: tuple[str, ...], preset: str, release: str) -> list[Manifest]:
    documents = yaml.load_all(text(chart, values, preset, release), yaml.CSafeLoader)
    return [document for document in documents if document]


def of_kind(objects: Sequence[Manifest], *kinds: str) -> list[Manifest]:
    return [each for each in objects if each["kind"] in kinds]


def pods(objects: Sequence[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Every pod template with the name of what makes it."""
    for each in objects:
        name, spec = f"{each['kind']}/{each['metadata']['name']}", each.get("spec", {})
        if "template" in spec and each["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job"):
            yield name, spec["template"]
        for part in ("leaderTemplate", "workerTemplate"):
            if part in spec.get("leaderWorkerTemplate", {}):
                yield f"{name}/{part}", spec["leaderWorkerTemplate"][part]


def main_container(pod: Manifest) -> Manifest:
    return pod["spec"]["containers"][0]


@functools.cache
def _validator(api: str, kind: str) -> jsonschema.Draft202012Validator | None:
    path = SCHEMAS / f"{api.replace('/', '_')}_{kind}.json"
    return jsonschema.Draft202012Validator(json.loads(path.read_text())) if path.exists() else None


@functools.cache
def _rules() -> dict[str, dict[str, list[dict[str, str]]]]:
    return json.loads((SCHEMAS / "rules.json").read_text())


def faults(manifest: Manifest) -> list[str]:
    """What an API server would refuse: wrong or unknown fields, and broken rules of custom resources."""
    api, kind = manifest["apiVersion"], manifest["kind"]
    validator = _validator(api, kind)
    if validator is None:
        try:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            return [f"{kind}: {str(error)[:400]}"]
        return []
    found = [f"{kind} {'/'.join(map(str, e.absolute_path))}: {e.message[:200]}" for e in validator.iter_errors(manifest)]
    for path, rules in _rules().get(kind, {}).items():
        for value in _at(manifest, path.split(".")):
            found += [f"{kind} {path}: {rule['message']}" for rule in rules if not _holds(rule["rule"], value)]
    return found


def _at(value: Any, path: list[str]) -> Iterator[Any]:
    if not path:
        yield value
    elif path[0] == "*":
        for item in value:
            yield from _at(item, path[1:])
    elif isinstance(value, dict) and path[0] in value:
        yield from _at(value[path[0]], path[1:])


@functools.cache
def _program(rule: str) -> Any:
    return compile(rule)


def _holds(rule: str, value: Any) -> bool:
    context = Context()
    context.add_variable("self", value)
    return bool(_program(rule).execute(context))
