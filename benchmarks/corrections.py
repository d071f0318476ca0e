"""What old data does to each objective, and the presets side by side, on the demo's task.

    python -m benchmarks.corrections --json FILE [--steps 60] [--seeds 3] [--lag 4] [--processes 2] [--arms clip,reinforce]

One process an arm, no services: batch k is sampled by the weights of step max(0, k - 1 - lag), as a pinned schedule would.
Same warm-up, tasks, optimizer and random streams in all arms; rewards are means of ten steps. About eight minutes with two
processes on two cores.

    on policy           the default preset at lag 0: what old data is measured against
    at --lag            `clip` (async-moe), `decoupled`, `gspo`, `dppo`: each must learn; and controls without a trust region.
                        `reinforce` takes old data as if it were fresh, which a run file may not ask for; `truncated` weighs it
                        by min(pi / mu, 2) and no more; `cispo` caps the weight on both sides and lets every gradient pass
    presets at lag 1    `grpo`, `dapo`, `gspo-moe`, `async-moe`, `ppo` as they are, at the demo's lag
    two steps, lag 1    two optimizer steps per batch, both with the trainer's own routes of a pass before them: `two steps` is
                        anchored at the sampler, `two steps decoupled` at that pass, with a truncated weight

    start               mean reward of the first batch
    worst_corrected, best_control       gain of the last ten steps over the first batch of the same seed: lowest of the former,
                                        highest of the controls
    uncorrected_fails                   every seed of `reinforce` ends below where it began
    corrected_learn                     every seed of every corrected arm gains at least `GAIN`
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.bare import Sampler, learner
from benchmarks.overlap import DEMO
from benchmarks.record import publish
from slipstream.config import Algorithm, RunFile, load, parse
from slipstream.protos.types.v1 import policy_pb2

WINDOW = 10
GAIN = 0.05
ON_POLICY, UNCORRECTED, CONTROLS = "on policy", "reinforce", ("cispo", "truncated", "reinforce")
# Each arm's whole [algorithm]. The demo's answers are short: gspo's clip is ten times its preset's.
ARMS: Mapping[str, Mapping[str, Any]] = {
    ON_POLICY: {"preset": "async-moe"},
    "clip": {"preset": "async-moe"},
    "decoupled": {"anchor": "interpolated", "correction": "truncated"},
    "gspo": {"preset": "gspo-moe", "clip_low": 3e-3, "clip_high": 4e-3},
    "dppo": {"policy_loss": "dppo_tv", "clip_high": 0.2},
    "cispo": {"policy_loss": "cispo"},
    "truncated": {"anchor": "recomputed", "correction": "truncated"},
    "reinforce": {"anchor": "recomputed", "correction": "none"},
    "preset grpo": {"preset": "grpo"},
    "preset dapo": {"preset": "dapo"},
    "preset gspo-moe": {"preset": "gspo-moe"},
    "preset async-moe": {"preset": "async-moe"},
    "preset ppo": {"preset": "ppo"},
    "two steps": {"route_replay": "trainer"},
    "two steps decoupled": {"anchor": "recomputed", "correction": "truncated", "route_replay": "trainer"},
}
# Arms with more than one optimizer step per batch: their [trainer] on top of the demo's.
TRAINER: Mapping[str, Mapping[str, Any]] = {arm: {"minibatches": 2} for arm in ARMS if arm.startswith("two steps")}
AT_DEMO_LAG = ("preset", "two steps")  # how the names of arms begin that are not asked to bear old data


def lag_of(arm: str, lag: int) -> int:
    """How old an arm's data is."""
    return 0 if arm == ON_POLICY else 1 if arm.startswith(AT_DEMO_LAG) else lag


def run_of(arm: str, seed: int, steps: int, lag: int) -> RunFile:
    """The demo with the arm's [algorithm]; the control that a run file refuses is made without asking."""
    run = load(DEMO, [f"run.seed={seed}", f"run.steps={steps}", f"schedule.max_lag={max(lag_of(arm, lag), 1)}",
                      "schedule.deterministic=false"])
    if arm == UNCORRECTED:
        return run.model_copy(update={"algorithm": Algorithm().model_copy(update=ARMS[arm])})
    data = run.model_dump(mode="json")
    return parse(data | {"algorithm": dict(ARMS[arm]), "trainer": data["trainer"] | TRAINER.get(arm, {})})


def rewards(job: tuple[int, str, int, int]) -> tuple[int, str, list[float], float]:
    """One training: seed, arm, mean reward of every step, CPU seconds."""
    seed, arm, steps, lag = job
    torch.set_num_threads(1)
    began = time.process_time()
    run, lag = run_of(arm, seed, steps, lag), lag_of(arm, lag)
    trained, sampler = learner(run), Sampler(run)
    versions, found = deque([trained.weights()], maxlen=lag + 1), []
    for k in range(1, steps + 1):
        sampler.decoder.load(versions[0], policy_pb2.PolicyVersion(number=k, step=max(0, k - 1 - lag)))
        found.append(trained.step(sampler.batch(k), k)["reward_mean"])
        versions.append(trained.weights())
    return seed, arm, found, time.process_time() - began


def tens(curve: list[float]) -> str:
    """Means of ten steps."""
    return " ".join(f"{statistics.fmean(curve[i:i + WINDOW]):.2f}" for i in range(0, len(curve), WINDOW))


def key_of(arm: str) -> str:
    """An arm in the name of a figure."""
    return arm.replace(" ", "_").replace("-", "_")


def figures_of(curves: Mapping[str, Mapping[int, list[float]]]) -> dict[str, Any]:
    """What the arms say together."""
    final = {arm: [statistics.fmean(curve[-WINDOW:]) for curve in found.values()] for arm, found in curves.items()}
    start = statistics.fmean(curve[0] for found in curves.values() for curve in found.values())
    figures: dict[str, Any] = {"start": start} | {
        f"final_{key_of(arm)}": statistics.fmean(values) for arm, values in final.items()}
    gains = {arm: [statistics.fmean(curve[-WINDOW:]) - curve[0] for curve in found.values()] for arm, found in curves.items()}
    corrected = [gain for arm, found in gains.items() for gain in found
                 if arm not in (*CONTROLS, ON_POLICY) and not arm.startswith(AT_DEMO_LAG)]
    if corrected:
        figures |= {"worst_corrected": min(corrected), "corrected_learn": min(corrected) >= GAIN}
    if controls := [gain for arm in CONTROLS for gain in gains.get(arm, ())]:
        figures["best_control"] = max(controls)
    if UNCORRECTED in gains:
        figures["uncorrected_fails"] = max(gains[UNCORRECTED]) < 0
    return figures


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lag", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    arms = arguments.arms.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"--arms {unknown[0]!r}: known are {', '.join(ARMS)}")
    jobs = [(seed, arm, arguments.steps, arguments.lag) for seed in range(arguments.seeds) for arm in arms]
    curves: dict[str, dict[int, list[float]]] = {arm: {} for arm in arms}
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for seed, arm, curve, seconds in pool.imap_unordered(rewards, jobs):
            curves[arm][seed] = curve
            print(f"seed {seed}  {arm:17} {tens(curve)}  {seconds:.0f} CPU-s", flush=True)
    curves = {arm: dict(sorted(found.items())) for arm, found in curves.items()}
    rows = [[arm, str(lag_of(arm, arguments.lag)), *(f"{statistics.fmean(c[-WINDOW:]):.2f}" for c in found.values())]
            for arm, found in curves.items()]
    figures = figures_of(curves) | {"lag": arguments.lag, "steps": arguments.steps, "seeds": arguments.seeds} | {
        f"curve_{key_of(arm)}_{seed}": tens(curve) for arm, found in curves.items() for seed, curve in found.items()}
    publish(f"mean reward of the last ten of {arguments.steps} steps",
            ["arm", "lag", *(f"seed {s}" for s in range(arguments.seeds))], rows, figures, arguments.json)


if __name__ == "__main__":
    main()
