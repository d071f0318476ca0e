"""vLLM's engines of one node, without a server: `vllm serve --headless` for engine arguments as JSON.

    python -m services.rollout.vllm_headless '{"model": "/dev/shm/...", "data_parallel_size": 16, ...}'
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import sys

if __name__ == "__main__":
    from vllm.entrypoints.cli.serve import run_headless

    # What the server's own parser would add; engine arguments that are not named keep vLLM's defaults.
    run_headless(argparse.Namespace(
        **json.loads(sys.argv[1]), api_server_count=0, reasoning_parser_plugin="", disable_log_stats=True))
