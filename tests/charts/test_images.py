"""Dockerfiles: linted, without root, with bases that a build can pin; and `make images` builds what the charts run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.charts.rendering import HELM, ROOT, SERVICES

DOCKERFILES = {
    service: ROOT / "services" / ("" if service in ("buffer", "reward", "environment") else service) / "Dockerfile"
    for service in SERVICES}


@pytest.mark.parametrize("path", sorted({str(path.relative_to(ROOT)) for path in DOCKERFILES.values()}))
def test_hadolint_has_nothing_to_say(path: str) -> None:
    command = [str(Path(sys.executable).with_name("hadolint")), str(ROOT / path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout


@pytest.mark.parametrize("service", SERVICES)
def test_images_run_without_root_on_a_base_that_can_be_pinned(service: str) -> None:
    """Every base is a build argument; every last stage ends as the chart's user, in the folder that the chart mounts."""
    text = DOCKERFILES[service].read_text()
    bases, stages = set(re.findall(r"^ARG (\w*BASE)=", text, re.M)), dict[str, str]()
    for block in re.split(r"^FROM ", text, flags=re.M)[1:]:
        words = block.partition("\n")[0].split()
        argument = re.fullmatch(r"\$\{(\w+)\}", words[0])
        assert argument[1] in bases if argument else words[0] in stages, words
        stages[words[-1]] = ("" if argument else stages[words[0]]) + block  # what a stage goes on from is a part of it
    lasts = [stage for name, stage in stages.items() if "ENTRYPOINT" in stage and (name == service or service not in stages)]
    assert lasts
    for stage in lasts:
        assert re.findall(r"^USER (\S+)", stage, re.M)[-1] == "65532:65532"
        assert re.findall(r"^WORKDIR (\S+)", stage, re.M)[-1] == "/var/lib/slipstream"
        assert "HOME=/var/lib/slipstream" in stage and "PYTHONDONTWRITEBYTECODE=1" in stage


def test_make_images_builds_what_the_charts_run() -> None:
    """Names and tags agree; a registry and a tag can be given."""
    env = {**os.environ, "DRY_RUN": "1", "BUILDER": "docker", "REGISTRY": "registry/team", "TAG": "7"}
    done = subprocess.run([str(ROOT / "tools/build_images.sh")], env=env, capture_output=True, text=True, check=True)
    built = re.findall(r"-t (\S+)", done.stdout)
    charts = [yaml.safe_load((HELM / service / "values.yaml").read_text())["image"]["repository"] for service in SERVICES]
    assert sorted(built) == sorted(f"registry/team/{name}:7" for name in charts)
    assert all(f"-f {path.relative_to(ROOT)}" in done.stdout for path in DOCKERFILES.values())
