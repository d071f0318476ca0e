"""Generate slipstream/protos/ from protos/: messages, services and their .pyi. `--check` fails when they differ.

protoc names Python packages after proto packages, so `slipstream.types.v1` would land inside the slipstream package itself;
the stubs live one level down, in slipstream.protos, and their imports are rewritten accordingly.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "protos"
TARGET = ROOT / "slipstream" / "protos"


def generate(target: Path) -> None:
    """Write every stub below `target`, which must not exist."""
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    google = next(Path(p) / "google" for p in sys.path if (Path(p) / "google" / "rpc" / "status.proto").exists())
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # protoc looks for its plugins there
    with tempfile.TemporaryDirectory() as scratch:
        files = sorted(str(p.relative_to(SOURCE)) for p in SOURCE.rglob("*.proto"))
        code = protoc.main(
            ["protoc", f"-I{SOURCE}", f"-I{well_known}", f"-I{google.parent}"]
            + [f"--{plugin}={scratch}" for plugin in ("python_out", "pyi_out", "grpc_python_out", "mypy_grpc_out")]
            + files
        )
        if code:
            raise SystemExit(f"protoc failed with {code}")
        shutil.copytree(Path(scratch) / "slipstream", target)
    for path in [*target.rglob("*.py"), *target.rglob("*.pyi")]:
        text = path.read_text()
        areas = r"(types|buffer|rollout|reward|trainer|environment|weights)"
        if path.suffix == ".pyi":
            text = re.sub(rf"\bslipstream\.{areas}\.v1\b(?=[. ])(?![^\n]*\.proto)", r"slipstream.protos.\1.v1", text)
        else:
            text = re.sub(rf"^from slipstream\.{areas}\.v1 import", r"from slipstream.protos.\1.v1 import", text, flags=re.M)
        path.write_text(text)
    for folder in [target, *(p for p in target.rglob("*") if p.is_dir())]:
        if folder.name != "__pycache__":
            (folder / "__init__.py").write_text("")
    (target / "__init__.py").write_text('"""Generated from protos/ by tools/generate_protos.py. Do not edit."""\n')


def differences(a: Path, b: Path) -> list[str]:
    """Relative paths whose contents differ or that exist on one side only."""
    names = {p.relative_to(r) for r in (a, b) for p in r.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    return sorted(
        str(n) for n in names if not ((a / n).exists() and (b / n).exists() and filecmp.cmp(a / n, b / n, shallow=False))
    )


def main() -> None:
    """Regenerate in place, or compare."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch) / "protos"
        generate(fresh)
        if "--check" in sys.argv:
            if changed := differences(fresh, TARGET):
                raise SystemExit("slipstream/protos is stale, run `make protos`: " + ", ".join(changed))
            return
        shutil.rmtree(TARGET, ignore_errors=True)
        shutil.copytree(fresh, TARGET)


if __name__ == "__main__":
    main()
