"""The vLLM arm of benchmarks.engines, run by the interpreter that has vLLM: `WIDTH SIZES REPEATS`, JSON on the last line."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time

import psutil

from benchmarks.engines import NEW, requests, run_file, tokens
from services.rollout.vllm_engine import VllmEngine
from slipstream.model import build, files, state
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion


def cpu_s() -> float:
    """CPU seconds of this process and of vLLM's."""
    mine = psutil.Process()
    return sum(t.user + t.system for t in (p.cpu_times() for p in [mine, *mine.children(recursive=True)]))


async def measured(hidden: int, sizes: list[int], repeats: int) -> dict[str, object]:
    run = run_file(hidden, max(sizes))
    model, tokenizer = build(run.model, 0)
    engine = VllmEngine(run)
    cpu: dict[int, list[float]] = {size: [] for size in sizes}
    wall: dict[int, list[float]] = {size: [] for size in sizes}
    try:
        await engine.start(files(model, tokenizer), state(model), PolicyVersion(number=1))
        for repeat in range(-1, repeats):
            for size in sizes:
                started, used = time.perf_counter(), cpu_s()
                tokens(await asyncio.gather(*(engine.generate(request) for request in requests(size, repeat + 1))), size * NEW)
                if repeat >= 0:
                    wall[size].append(size * NEW / (time.perf_counter() - started))
                    cpu[size].append(size * NEW / max(cpu_s() - used, 1e-6))
    finally:
        await engine.stop()
    import vllm

    return {"version": vllm.__version__, "cpu": {s: statistics.median(v) for s, v in cpu.items()},
            "wall": {s: statistics.median(v) for s, v in wall.items()}}


if __name__ == "__main__":  # vLLM's process imports this file again
    print(json.dumps(asyncio.run(measured(int(sys.argv[1]), [int(s) for s in sys.argv[2].split(",")], int(sys.argv[3])))))
