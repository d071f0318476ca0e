"""`slipstream run` with the diverted services: python -m benchmarks.faults.supervise RUN.json [--fresh]"""

from __future__ import annotations

import sys
import time

from slipstream.cli import explain, run
from slipstream.config import load
from slipstream.errors import SlipstreamError


def main() -> int:
    """The exit code of the run."""
    options = run.Options(
        plain=True, fresh="--fresh" in sys.argv, prefix="benchmarks.faults.services", started=time.monotonic())
    try:
        return run.run(load(sys.argv[1]), options)
    except SlipstreamError as error:
        return explain(error)


if __name__ == "__main__":
    sys.exit(main())
