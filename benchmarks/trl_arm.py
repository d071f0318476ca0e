"""TRL's GRPOTrainer on the demo's task: the arm that `benchmarks.trainer` compares with. Runs in TRL's own environment.

    make bench-trl-env                                                        # once: TRL and datasets, on top of the project's
    .venv/trl/bin/python -m benchmarks.trl_arm RUN.json MODEL OUT.json --target 0.6

Same start, tasks in the same order, answers per task, clip, learning rate, AdamW and gradient norm as RUN.json says. Generous:
no logging, evaluation, checkpoints, reference model, auxiliary loss or gradient checkpointing; fp32, as CPUs like it; one
generation of the whole batch; log-probabilities of the old policy are not computed again, since one update is made of a batch;
`--rows` and `--experts` are the fastest of those that were tried (--rows 128, 256, 512; grouped_mm, eager; 1 and 2 threads).

OUT.json gets {"start_unix": ..., "time_unix": [...], "reward_mean": [...]}: when training began, all imports and loading done,
and one entry a step, until the mean reward of `WINDOW` steps reaches --target.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from slipstream import config, seeds
from slipstream.environment import Task, load

WINDOW = 10


def tasks(run: config.RunFile) -> Dataset:
    """The run's tasks in its order."""
    [settings] = run.environments
    environment, rows = load(settings.entry, settings.args), []
    for draw in range(run.run.steps * run.schedule.groups_per_batch):
        reset: Any = environment.reset(Task(draw, seeds.task_seed(run.run.seed, settings.name, draw), settings.name))
        rows.append({"prompt": reset.text, "right": reset.answer})
    return Dataset.from_list(rows)


def settings(run: config.RunFile, rows: int, folder: str) -> GRPOConfig:
    """The run file's numbers in TRL's words."""
    samples = run.schedule.groups_per_batch * run.schedule.group_size
    return GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, seed=run.run.seed, max_steps=run.run.steps, shuffle_dataset=False,
        per_device_train_batch_size=rows, gradient_accumulation_steps=samples // rows, generation_batch_size=samples,
        num_generations=run.schedule.group_size, max_completion_length=run.rollout.max_new_tokens, temperature=1.0,
        learning_rate=run.trainer.learning_rate, lr_scheduler_type="constant", warmup_steps=0, adam_beta1=run.trainer.betas[0],
        adam_beta2=run.trainer.betas[1], adam_epsilon=run.trainer.eps, weight_decay=run.trainer.weight_decay,
        max_grad_norm=run.trainer.max_grad_norm, beta=0.0, loss_type="dapo", scale_rewards="group",
        epsilon=run.algorithm.clip_low, epsilon_high=run.algorithm.clip_high, router_aux_loss_coef=0.0,
        gradient_checkpointing=False, logging_strategy="no", save_strategy="no", eval_strategy="no", report_to="none",
        disable_tqdm=True, dataloader_num_workers=0, dataloader_pin_memory=False)


class Curve(TrainerCallback):
    """Notes time and reward of every step; ends training at the target."""

    def __init__(self, target: float, end: int) -> None:
        self.target, self.end = target, end
        self.start_unix, self.time_unix, self.reward_mean = 0.0, [], []

    def reward(self, completions: list[str], completion_ids: list[list[int]], right: list[str], **_: Any) -> list[float]:
        """1 for the right answer that ends."""
        found = [
            float(said == wanted and ids[-1] == self.end)
            for said, ids, wanted in zip(completions, completion_ids, right, strict=True)]
        self.reward_mean.append(statistics.fmean(found))
        return found

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.start_unix = time.time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self.time_unix.append(time.time())
        if len(self.time_unix) >= WINDOW and statistics.fmean(self.reward_mean[-WINDOW:]) >= self.target:
            control.should_training_stop = True
        return control


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file")
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", type=float, default=2.0, help="stop at this mean reward of ten steps; 2 = never")
    parser.add_argument("--most-steps", type=int, default=0, help="0 = as many as the run file says")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--experts", default="grouped_mm")
    arguments = parser.parse_args()
    run = config.load(arguments.run_file, [f"run.steps={arguments.most_steps}"] if arguments.most_steps else [])
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, experts_implementation=arguments.experts)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    curve = Curve(arguments.target, tokenizer.eos_token_id)
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=curve.reward, train_dataset=tasks(run),
        args=settings(run, arguments.rows, str(arguments.out.parent)), callbacks=[curve])
    trainer.train()
    arguments.out.write_text(json.dumps(
        {"start_unix": curve.start_unix, "time_unix": curve.time_unix, "reward_mean": curve.reward_mean}))


if __name__ == "__main__":
    main()
