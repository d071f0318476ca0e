"""Write helm/<chart>/values.schema.json: what all charts share (helm/common/values.*.json) and what is the chart's own.

    python tools/generate_chart_schemas.py [--check]

helm/<chart>/values.own.json holds {"properties": {...}, "required": [...], "definitions": {...}}. Helm reads one file a chart
and follows no references between files, so they are put together here. Unknown keys are refused everywhere but in what
Kubernetes checks itself. --check: exit 1 when a file is stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HELM = Path(__file__).resolve().parent.parent / "helm"
SHARED = HELM / "common"


def schema(chart: Path) -> dict[str, Any]:
    """The whole schema of a chart's values; a property of its own wins over a shared one of that name."""
    own = json.loads((chart / "values.own.json").read_text())
    definitions = json.loads((SHARED / "values.definitions.json").read_text()) | own.get("definitions", {})
    properties = json.loads((SHARED / "values.properties.json").read_text()) | own["properties"]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#", "title": f"Values of the {chart.name} chart", "type": "object",
        "additionalProperties": False, "required": own.get("required", []), "properties": properties,
        "definitions": definitions}


def charts() -> list[Path]:
    """Folders of the charts whose schema is made here."""
    return sorted(path.parent for path in HELM.glob("*/values.own.json"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is stale")
    check = parser.parse_args().check
    stale = 0
    for chart in charts():
        path, text = chart / "values.schema.json", json.dumps(schema(chart), indent=1) + "\n"
        if not path.exists() or path.read_text() != text:
            stale += 1
            if check:
                print(f"{path.relative_to(HELM.parent)} is stale: run python tools/generate_chart_schemas.py")
            else:
                path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
