"""The trainer against what one would use instead: a plain loop for one step, TRL for a whole training.

    python -m benchmarks.trainer --json FILE [--rounds 8] [--seeds 3] [--target 0.7] [--only step|reward]

**A step** (about a minute): Learner.step, with everything that it does to a batch, against benchmarks/bare_step.py, a plain
transformers + AdamW loop, on the same recorded batches from the same weights, one thread each. Two shapes: the demo's batch,
and rows of 64 to 256 tokens. Both take turns; a ratio is of CPU seconds of one round, the figure the median over rounds. After
the first step their weights are compared: the same work, else there is no figure.

    step_over_bare, step_over_bare_long         our step / bare step, CPU seconds; bar: 1.1

**Time to a reward** (about five minutes for three seeds; needs `make bench-trl-env`): `slipstream run`, with all services and a
synced ledger, against TRL's GRPOTrainer (benchmarks/trl_arm.py, which says how it is set) from the same warmed-up weights with
fresh moments, on the same tasks, samples per step, learning rate and clip, on this machine, with as many threads for TRL as
make it fastest. The clock starts when each is ready to sample its first batch, and ends when the mean reward of ten steps is
at --target.

    time_to_reward_over_trl                     our seconds / TRL's, median over seeds: below 1, this project is faster
    steps_ours, steps_trl                       optimizer steps to the target: learning, apart from speed
    ms_step_ours, ms_step_trl                   milliseconds of a step, apart from learning
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bare import Sampler, learner
from benchmarks.bare_step import Answer, BareStep
from benchmarks.overlap import DEMO, ROOT
from benchmarks.record import publish
from services.rollout.engine import Request
from services.trainer.learner import Learner
from services.trainer.packing import Group, Member
from slipstream import config
from slipstream.errors import SlipstreamError
from slipstream.protos.types.v1 import policy_pb2
from slipstream.sample import FINISH_STOP, Sample, Segment

BATCHES = 4  # recorded of each shape
SHORTEST, LONGEST, PROMPT = 32, 224, 32  # answers and prompt of the long rows
LONG = ["schedule.groups_per_batch=4", "rollout.context=256", "rollout.max_new_tokens=224",
        "model.build.config.max_position_embeddings=256"]
WINDOW = 10
TRIED = 5  # steps of TRL with each number of threads
TRL = Path(sys.prefix) / "trl" / "bin" / "python"
CLOSE = 1e-5  # of weights after the same step


def demo(seed: int, *overrides: str) -> config.RunFile:
    """The demo's run file with the fast kernels and without its warm-up's moments."""
    return config.load(DEMO, [f"run.seed={seed}", "schedule.deterministic=false", "trainer.warmup.keep_optimizer=false",
                              *overrides])


def long_groups(sampler: Sampler, k: int) -> list[Group]:
    """Answers of drawn lengths to random prompts, with random rewards: a shape, not a task."""
    schedule, draws, groups = sampler.run.schedule, np.random.default_rng(k), []
    for draw in range(schedule.groups_per_batch):
        prompt = draws.integers(2, 12, PROMPT).astype(np.int32)
        requests = [
            Request(prompt, int(draws.integers(SHORTEST, LONGEST + 1)), int(draws.integers(1 << 31)))
            for _ in range(schedule.group_size)]
        members = []
        for i, answer in enumerate(sampler.decoder.decode(requests)):
            tokens = np.concatenate([prompt, answer.tokens])
            segment = Segment(tokens, np.arange(len(tokens)) >= PROMPT, answer.logprobs, answer.spans)
            members.append(Member(i, Sample([segment], FINISH_STOP), float(draws.integers(2))))
        groups.append(Group(draw, members))
    return groups


def plain(groups: list[Group]) -> list[list[Answer]]:
    """The same batch as the plain loop holds it."""
    return [[
        Answer(torch.from_numpy(segment.tokens.astype(np.int64)), int(segment.loss_mask.argmax()),
               torch.from_numpy(segment.logprobs.astype(np.float32)), member.reward)
        for member in group.members for segment in member.sample.segments] for group in groups]


@dataclass
class Pair:
    """Seconds of one round of each arm."""

    ours: float
    bare: float


def step_rounds(run: config.RunFile, folder: Path, long: bool, rounds: int) -> list[Pair]:
    """Paired rounds over the recorded batches. Raises SlipstreamError when the arms do not do the same work."""
    ours, sampler = learner(run), Sampler(run)
    sampler.decoder.load(ours.weights(), policy_pb2.PolicyVersion(number=1, step=0))
    batches = [long_groups(sampler, k) if long else sampler.batch(k) for k in range(1, BATCHES + 1)]
    ours.save_pretrained(folder)
    bare, same = BareStep(str(folder), run), [plain(groups) for groups in batches]
    ours.step(batches[0], 1)
    bare.step(same[0])
    check_equal(ours, bare)
    found = []
    for number in range(rounds):
        pair = Pair(0.0, 0.0)
        for k, groups in enumerate(batches):
            for arm in ("ours", "bare") if (number + k) % 2 else ("bare", "ours"):
                began = time.process_time()
                if arm == "ours":
                    ours.step(groups, 1)
                else:
                    bare.step(same[k])
                setattr(pair, arm, getattr(pair, arm) + time.process_time() - began)
        found.append(pair)
    return found


def check_equal(ours: Learner, bare: BareStep) -> None:
    """After the same step from the same weights: the weights are the same but for rounding."""
    theirs = bare.model.state_dict()
    worst = max(float((theirs[name] - tensor).abs().max()) for name, tensor in ours.model.state_dict().items())
    # Adam's first step is the sign of the gradient times the rate: rounding may flip it where the gradient is nothing.
    differ = statistics.fmean(
        float(((theirs[name] - tensor).abs() > CLOSE).float().mean()) for name, tensor in ours.model.state_dict().items())
    if differ > 0.01:
        raise SlipstreamError(f"after one step {differ:.1%} of the weights differ, by up to {worst:.2g}: not the same work")


def step_figures(rounds: int) -> tuple[dict[str, Any], list[list[str]]]:
    """Both shapes."""
    figures: dict[str, Any] = {}
    rows = []
    for name, overrides in (("", []), ("_long", LONG)):
        with tempfile.TemporaryDirectory() as folder:
            pairs = step_rounds(demo(0, *overrides), Path(folder), bool(name), rounds)
        ratios = sorted(pair.ours / pair.bare for pair in pairs)
        figures[f"step_over_bare{name}"] = statistics.median(ratios)
        rows.append([f"step {name.strip('_') or 'demo'}", *(f"{statistics.median(x) / BATCHES * 1000:.0f} ms" for x in (
            [p.ours for p in pairs], [p.bare for p in pairs])), f"{statistics.median(ratios):.3f}",
            f"{ratios[0]:.3f} to {ratios[-1]:.3f}"])
        print(*rows[-1], flush=True)
    return figures, rows


@dataclass
class Curve:
    """Seconds since an arm was ready, and reward, of every step."""

    seconds: list[float]
    rewards: list[float]

    def reached(self, target: float) -> bool:
        """Whether the last window is at the target."""
        return len(self.rewards) >= WINDOW and statistics.fmean(self.rewards[-WINDOW:]) >= target

    def text(self) -> str:
        """Every ten steps: seconds and mean reward."""
        ends = [*range(WINDOW, len(self.rewards), WINDOW), len(self.rewards)]
        return "  ".join(
            f"{self.seconds[end - 1]:.1f}s {statistics.fmean(self.rewards[max(0, end - WINDOW):end]):.2f}" for end in ends)


def our_curve(run_file: Path, folder: Path, target: float) -> Curve:
    """`slipstream run` with all its processes. Ready = its trainer asks for batch 1."""
    command = [sys.executable, "-m", "slipstream.cli", "run", str(run_file), "--plain",
               "--set", f"run.folder={folder}", "--set", f"run.target_reward={target}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    log = folder / "metrics.jsonl"
    if not log.exists():
        raise SlipstreamError(f"slipstream run made no step: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    began = lines[0]["time_unix"] - lines[0]["step_s"] - lines[0]["wait_s"]
    return Curve([line["time_unix"] - began for line in lines], [line["reward_mean"] for line in lines])


def trl_curve(run_file: Path, model: Path, folder: Path, target: float, threads: int, steps: int = 0) -> Curve:
    """TRL by itself. Ready = its trainer begins."""
    out, environment = folder / "trl.json", {name: v for name, v in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [str(TRL), "-m", "benchmarks.trl_arm", str(run_file), str(model), str(out), "--target", str(target),
         "--threads", str(threads), "--most-steps", str(steps)],
        cwd=ROOT, capture_output=True, text=True, timeout=1800, env=environment)
    if done.returncode:
        raise SlipstreamError(f"TRL failed: {done.stderr[-2000:]}")
    data = json.loads(out.read_text())
    return Curve([t - data["start_unix"] for t in data["time_unix"]], data["reward_mean"])


def trl_threads(run_file: Path, model: Path, folder: Path) -> int:
    """With how many threads TRL's steps are fastest here: one, or one a core."""
    took = {}
    for threads in {1, len(os.sched_getaffinity(0))}:
        seconds = trl_curve(run_file, model, folder, 2.0, threads, TRIED).seconds
        took[threads] = (seconds[-1] - seconds[0]) / (len(seconds) - 1)
        print(f"TRL with {threads} threads: {took[threads] * 1000:.0f} ms a step", flush=True)
    return min(took, key=lambda threads: took[threads])


def reward_figures(seeds: int, target: float, steps: int) -> tuple[dict[str, Any], list[list[str]]]:
    """All seeds, arms by turns."""
    if not TRL.exists():
        raise SystemExit(f"{TRL} is not there: make bench-trl-env, or give --only step")
    found: list[tuple[Curve, Curve]] = []
    threads = 0
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            run, start, run_file = demo(seed, f"run.steps={steps}"), folder / "start", folder / "run.json"
            learner(run).save_pretrained(start)
            data = run.model_dump(mode="json") | {"model": {"path": str(start)}}
            data["trainer"]["warmup"] = {"steps": 0}
            run_file.write_text(json.dumps(data))
            threads = threads or trl_threads(run_file, start, folder)
            arms = {"ours": lambda: our_curve(run_file, folder / "run", target),  # noqa: B023 - called in this round
                    "trl": lambda: trl_curve(run_file, start, folder, target, threads)}  # noqa: B023
            curves = {arm: arms[arm]() for arm in (("ours", "trl") if seed % 2 else ("trl", "ours"))}
        found.append((curves["ours"], curves["trl"]))
        for arm, curve in curves.items():
            print(f"seed {seed}  {arm:4}  {curve.text()}", flush=True)
    rows = [[f"reward {target}, seed {seed}", f"{ours.seconds[-1]:.1f} s", f"{trl.seconds[-1]:.1f} s",
             f"{ours.seconds[-1] / trl.seconds[-1]:.3f}", f"{len(ours.rewards)} and {len(trl.rewards)} steps"]
            for seed, (ours, trl) in enumerate(found)]
    figures: dict[str, Any] = {
        "time_to_reward_over_trl": statistics.median(ours.seconds[-1] / trl.seconds[-1] for ours, trl in found),
        "target": target, "trl_threads": threads, "all_reached": all(curve.reached(target) for pair in found for curve in pair)}
    for i, name in enumerate(("ours", "trl")):
        figures[f"steps_{name}"] = statistics.median(len(pair[i].rewards) for pair in found)
        figures[f"ms_step_{name}"] = statistics.median(1000 * pair[i].seconds[-1] / len(pair[i].seconds) for pair in found)
        figures |= {f"curve_{name}_{seed}": pair[i].text() for seed, pair in enumerate(found)}
    return figures, rows


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.7)
    parser.add_argument("--most-steps", type=int, default=200)
    parser.add_argument("--only", choices=["step", "reward"])
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    rows: list[list[str]] = []
    if arguments.only != "reward":
        part, lines = step_figures(arguments.rounds)
        figures, rows = figures | part, rows + lines
    if arguments.only != "step":
        part, lines = reward_figures(arguments.seeds, arguments.target, arguments.most_steps)
        figures, rows = figures | part, rows + lines
    publish("ours against a plain loop and against TRL", ["what", "ours", "theirs", "ours / theirs", ""], rows, figures,
            arguments.json)


if __name__ == "__main__":
    main()
