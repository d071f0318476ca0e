"""What old data does to each objective: the demo's task with every token sampled exactly `--lag` steps behind, or on policy.

    python -m benchmarks.corrections --json FILE [--steps 80] [--seeds 3] [--lag 4] [--arms clip,reinforce]

One process, no services: batch k is sampled by the weights of step max(0, k - 1 - lag), as a pinned schedule would. Same start,
same tasks, same optimizer in all arms; rewards are means of ten steps. The controls have no trust region: `reinforce` takes
stale data as if it were fresh, which a run file may not ask for; `truncated` weighs it by min(pi / mu, 2) and no more.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.bare import Sampler, learner
from benchmarks.overlap import DEMO
from benchmarks.record import publish
from services.trainer.algorithms.objective import Objective
from slipstream.config import Algorithm, RunFile, load
from slipstream.protos.types.v1 import policy_pb2

WINDOW = 10
CONTROLS = ("reinforce", "truncated")
# Each arm's [algorithm]. The demo's answers are short: gspo's clip is ten times its preset's.
ARMS: Mapping[str, Mapping[str, Any]] = {
    "clip": {"preset": "async-moe"},
    "decoupled": {"anchor": "interpolated", "correction": "truncated"},
    "gspo": {"preset": "gspo-moe", "clip_low": 3e-3, "clip_high": 4e-3},
    "dppo": {"policy_loss": "dppo_tv", "clip_high": 0.2},
    "cispo": {"policy_loss": "cispo"},
    "truncated": {"anchor": "recomputed", "correction": "truncated"},
    "reinforce": {"anchor": "recomputed", "correction": "none"},
}


def objective(run: RunFile, arm: str) -> Objective:
    """The arm's objective; the control that a run file refuses is made without asking."""
    settings = dict(ARMS[arm])
    made = Algorithm.model_construct(**Algorithm().model_dump() | settings) if arm == "reinforce" else Algorithm(**settings)
    return Objective(made, run.rollout.max_new_tokens)


def rewards(run: RunFile, arm: str, lag: int) -> list[float]:
    """Mean reward of every step of one training."""
    trained, sampler = learner(run), Sampler(run)
    trained.objective = objective(run, arm)
    versions, found = deque([trained.weights()], maxlen=lag + 1), []
    for k in range(1, run.run.steps + 1):
        sampler.decoder.load(versions[0], policy_pb2.PolicyVersion(number=k, step=max(0, k - 1 - lag)))
        found.append(trained.step(sampler.batch(k), k)["reward_mean"])
        versions.append(trained.weights())
    return found


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lag", type=int, default=4)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = [("on policy", "clip", 0), *((name, name, arguments.lag) for name in arguments.arms.split(","))]
    curves: dict[str, list[list[float]]] = {name: [] for name, _, _ in names}
    for seed in range(arguments.seeds):
        for name, arm, lag in names:
            run = load(DEMO, [f"run.seed={seed}", f"run.steps={arguments.steps}", f"schedule.max_lag={max(lag, 1)}",
                              "schedule.deterministic=false"])
            curve = rewards(run, arm, lag)
            curves[name].append(curve)
            means = [statistics.fmean(curve[i:i + WINDOW]) for i in range(0, len(curve), WINDOW)]
            print(f"seed {seed}  {name:12}", *(f"{mean:.2f}" for mean in means), flush=True)
    final = {name: [statistics.fmean(c[-WINDOW:]) for c in found] for name, found in curves.items()}
    figures: dict[str, Any] = {f"final_{name.replace(' ', '_')}": statistics.fmean(v) for name, v in final.items()}
    controls = [v for name, found in final.items() if name in CONTROLS for v in found]
    corrected = [v for name, found in final.items() if name not in (*CONTROLS, "on policy") for v in found]
    if controls and corrected:
        figures |= {"best_control": max(controls), "worst_corrected": min(corrected)}
    figures |= {"lag": arguments.lag, "steps": arguments.steps, "seeds": arguments.seeds,
                "start": statistics.fmean(c[0] for found in curves.values() for c in found), "finals": json.dumps(final)}
    rows = [[name, *(f"{v:.2f}" for v in found)] for name, found in final.items()]
    publish(f"mean reward of the last ten of {arguments.steps} steps, lag {arguments.lag}",
            ["arm", *(f"seed {s}" for s in range(arguments.seeds))], rows, figures, arguments.json)


if __name__ == "__main__":
    main()
