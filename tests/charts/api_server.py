"""A stand-in for the Kubernetes API server: enough for the real helm and kubectl to install, upgrade and roll back releases.

It knows discovery, create, read, list by labels, replace, merge, server-side apply and delete, dry runs included, and refuses
what `rendering.faults` refuses. Of field ownership it knows one rule, the one that matters for autoscaled workloads: who set
`spec.replicas` last owns it, and an apply by somebody else with another number is a conflict. No controllers act.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.charts.rendering import faults

# group/version -> (kind, plural, namespaced)
RESOURCES: dict[str, list[tuple[str, str, bool]]] = {
    "v1": [("Secret", "secrets", True), ("ConfigMap", "configmaps", True), ("Service", "services", True),
           ("ServiceAccount", "serviceaccounts", True), ("Namespace", "namespaces", False), ("Pod", "pods", True)],
    "apps/v1": [("Deployment", "deployments", True), ("StatefulSet", "statefulsets", True), ("DaemonSet", "daemonsets", True)],
    "policy/v1": [("PodDisruptionBudget", "poddisruptionbudgets", True)],
    "networking.k8s.io/v1": [("NetworkPolicy", "networkpolicies", True)],
    "cert-manager.io/v1": [("Certificate", "certificates", True), ("Issuer", "issuers", True)],
    "keda.sh/v1alpha1": [("ScaledObject", "scaledobjects", True)],
    "leaderworkerset.x-k8s.io/v1": [("LeaderWorkerSet", "leaderworkersets", True)],
    "monitoring.coreos.com/v1": [("PodMonitor", "podmonitors", True), ("PrometheusRule", "prometheusrules", True)],
    "autoscaling/v2": [("HorizontalPodAutoscaler", "horizontalpodautoscalers", True)],
    "karpenter.sh/v1": [("NodePool", "nodepools", False), ("NodeClaim", "nodeclaims", False)],
    "karpenter.k8s.aws/v1": [("EC2NodeClass", "ec2nodeclasses", False)],
}
_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<plural>[a-z0-9]+)(?:/(?P<name>[^/]+))?$")

Key = tuple[str, str, str, str]  # group/version, plural, namespace, name


class Refusal(Exception):
    """An answer that is no success."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        self.code, self.reason, self.message = code, reason, message


class Cluster:
    """All objects, and who owns the replicas of which."""

    def __init__(self) -> None:
        self.objects: dict[Key, dict[str, Any]] = {}
        self.owners: dict[Key, str] = {}
        self.writes: list[tuple[str, str, str]] = []  # verb, kind, name: everything that changed something
        self.lock = threading.Lock()
        self._revision = 0

    def find(self, kind: str, name: str) -> dict[str, Any]:
        found, = [each for each in self.objects.values() if each["kind"] == kind and each["metadata"]["name"] == name]
        return found

    def scale(self, kind: str, name: str, replicas: int, manager: str = "horizontal-pod-autoscaler") -> None:
        """What an autoscaler does through the scale subresource."""
        key, = [k for k, each in self.objects.items() if each["kind"] == kind and each["metadata"]["name"] == name]
        self.objects[key]["spec"]["replicas"] = replicas
        self.owners[key] = manager

    def put(self, key: Key, manifest: dict[str, Any], verb: str, dry_run: bool) -> dict[str, Any]:
        """Check and keep an object."""
        if found := faults({k: v for k, v in manifest.items() if k != "status"}):
            raise Refusal(422, "Invalid", "; ".join(found))
        self._revision += 1
        former = self.objects.get(key)
        generation = former["metadata"]["generation"] if former else 0
        if former is None or former.get("spec") != manifest.get("spec"):
            generation += 1
        manifest["metadata"] = {
            **manifest["metadata"], "name": key[3], "uid": f"uid-{key[1]}-{key[3]}", "resourceVersion": str(self._revision),
            "generation": generation, "creationTimestamp": "2026-01-01T00:00:00Z"} | ({"namespace": key[2]} if key[2] else {})
        if not dry_run:
            self.objects[key] = manifest
            self.writes.append((verb, manifest["kind"], key[3]))
        return manifest

    def apply(self, key: Key, manifest: dict[str, Any], manager: str, force: bool, dry_run: bool) -> dict[str, Any]:
        """Server-side apply. Raises a conflict when replicas belong to somebody else and differ."""
        former, owner = self.objects.get(key), self.owners.get(key, manager)
        theirs = (former or {}).get("spec", {}).get("replicas")
        given = manifest.get("spec", {}).get("replicas")
        if former and owner != manager and theirs is not None:
            if given is None:
                manifest["spec"]["replicas"] = theirs  # not ours, so it stays
            elif given != theirs and not force:
                raise Refusal(
                    409, "Conflict", f'Apply failed with 1 conflict: conflict with "{owner}" with subresource "scale" using '
                    f"{key[0]}: .spec.replicas")
            elif not dry_run:
                self.owners[key] = manager
        elif given is not None and not dry_run:
            self.owners[key] = manager
        return self.put(key, manifest, "apply", dry_run)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: failures are told by the clients."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/openapi/v2":  # no schemas to check against on the client's side
            return self._send(200, b"", "application/com.github.proto-openapi.spec.v2.v1.0+protobuf")
        found = discovery(path)
        return self._json(200, found) if found is not None else self._answer(self._read)

    def do_POST(self) -> None:
        self._answer(self._create)

    def do_PUT(self) -> None:
        self._answer(self._replace)

    def do_PATCH(self) -> None:
        self._answer(self._patch)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def _answer(self, act: Any) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        parts = urlsplit(self.path)
        found = _PATH.match(parts.path)
        try:
            if found is None:
                raise Refusal(404, "NotFound", f"no such path: {parts.path}")
            api = found["core"] or f"{found['group']}/{found['version']}"
            key = (api, found["plural"], found["namespace"] or "", found["name"] or "")
            with self.cluster.lock:
                code, answer = act(key, {name: values[0] for name, values in parse_qs(parts.query).items()}, body)
        except Refusal as refusal:
            code, answer = refusal.code, {
                "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": refusal.code, "reason": refusal.reason,
                "message": refusal.message}
        self._json(code, answer)

    def _read(self, key: Key, query: dict[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
        if key[3]:
            if key not in self.cluster.objects:
                raise Refusal(404, "NotFound", f"{key[1]} {key[3]!r} not found")
            return 200, self.cluster.objects[key]
        wanted = [part.split("=") for part in query.get("labelSelector", "").split(",") if "=" in part]
        items = [
            each for (api, plural, namespace, _), each in self.cluster.objects.items()
            if (api, plural) == key[:2] and key[2] in ("", namespace)
            and all(each["metadata"].get("labels", {}).get(name.rstrip("=")) == value for name, *_, value in wanted)]
        kind = next(kind for kind, plural, _ in RESOURCES[key[0]] if plural == key[1])
        return 200, {"kind": f"{kind}List", "apiVersion": key[0], "metadata": {"resourceVersion": "1"}, "items": items}

    def _create(self, key: Key, query: dict[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
        manifest = decoded(body)
        key = (*key[:3], manifest["metadata"]["name"])
        if key in self.cluster.objects:
            raise Refusal(409, "AlreadyExists", f"{key[1]} {key[3]!r} already exists")
        return 201, self.cluster.put(key, manifest, "create", "dryRun" in query)

    def _replace(self, key: Key, query: dict[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
        return 200, self.cluster.put(key, decoded(body), "replace", "dryRun" in query)

    def _patch(self, key: Key, query: dict[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
        patch, dry_run = yaml.load(body, yaml.CSafeLoader), "dryRun" in query
        if "apply-patch" in self.headers["Content-Type"]:
            return 200, self.cluster.apply(key, patch, query["fieldManager"], query.get("force") == "true", dry_run)
        if key not in self.cluster.objects:
            raise Refusal(404, "NotFound", f"{key[1]} {key[3]!r} not found")
        return 200, self.cluster.put(key, merged(self.cluster.objects[key], patch), "patch", dry_run)

    def _delete(self, key: Key, query: dict[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
        if key not in self.cluster.objects:
            raise Refusal(404, "NotFound", f"{key[1]} {key[3]!r} not found")
        gone = self.cluster.objects.pop(key)
        self.cluster.owners.pop(key, None)
        self.cluster.writes.append(("delete", gone["kind"], key[3]))
        return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _json(self, code: int, answer: dict[str, Any]) -> None:
        self._send(code, json.dumps(answer).encode(), "application/json")

    def _send(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def discovery(path: str) -> dict[str, Any] | None:
    """What a client asks first: version, groups, and the kinds of each."""
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = [(api.split("/")[0], {"groupVersion": api, "version": api.split("/")[1]}) for api in RESOURCES if "/" in api]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [
            {"name": name, "versions": [version], "preferredVersion": version} for name, version in versions]}
    api = path.removeprefix("/apis/").removeprefix("/api/")
    if api not in RESOURCES:
        return None
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api, "resources": [
        {"name": plural, "singularName": kind.lower(), "namespaced": namespaced, "kind": kind, "verbs": verbs,
         "shortNames": ["hpa"] if kind == "HorizontalPodAutoscaler" else []}
        for kind, plural, namespaced in RESOURCES[api]]}


def merged(old: Any, patch: Any) -> Any:
    """A merge patch: null removes."""
    if not isinstance(patch, dict) or not isinstance(old, dict):
        return patch
    return {
        key: merged(old.get(key), patch[key]) if key in patch else old[key]
        for key in [*old, *(k for k in patch if k not in old)] if patch.get(key, 0) is not None}


def decoded(body: bytes) -> dict[str, Any]:
    """JSON, or a Secret in protobuf: helm writes its releases that way."""
    if not body.startswith(b"k8s\0"):
        return json.loads(body)
    import base64
    raw = fields(body[4:])[2][0]
    secret = fields(raw)
    meta = fields(secret[1][0])

    def strings(entries: list[bytes]) -> dict[str, bytes]:
        return {fields(e)[1][0].decode(): fields(e).get(2, [b""])[0] for e in entries}

    labels = {name: value.decode() for name, value in strings(meta.get(11, [])).items()}
    return {
        "apiVersion": "v1", "kind": "Secret", "type": secret[3][0].decode(),
        "metadata": {"name": meta[1][0].decode(), "labels": labels},
        "data": {name: base64.b64encode(value).decode() for name, value in strings(secret.get(2, [])).items()}}


def fields(message: bytes) -> dict[int, list[Any]]:
    """The fields of a protobuf message by number: bytes for strings, bytes and messages, ints for varints."""
    found: dict[int, list[Any]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        tag = varint()
        if tag & 7 == 0:
            found.setdefault(tag >> 3, []).append(varint())
        else:
            size = varint()
            found.setdefault(tag >> 3, []).append(message[at:at + size])
            at += size
    return found


@contextmanager
def serving(folder: Path) -> Iterator[tuple[Cluster, Path]]:
    """A cluster on a free port, and the kubeconfig that leads there."""
    cluster = Cluster()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"cluster": cluster}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    config = folder / "kubeconfig"
    config.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "runs"}}],
        "users": [{"name": "test", "user": {}}]}))
    try:
        yield cluster, config
    finally:
        server.shutdown()
        server.server_close()
