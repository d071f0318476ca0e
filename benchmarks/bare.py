"""The demo's training without any service: what the services are measured against.

    python -m benchmarks.bare RUN.json LOG.jsonl sync --threads 2
    python -m benchmarks.bare RUN.json LOG.jsonl two-processes --lag 1

Same model, warm-up, engine, loss, optimizer and kernels as the services; left out: leases, environments over a seam, scoring as
a hop, checksums, durability, versions in an object store, restarts. `sync` is one process that generates and trains by turns;
`two-processes` is a generator and a trainer joined by two pipes, the generator at most `lag` steps behind.

LOG.jsonl gets a line a step, with time_unix and reward_mean.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from services.rollout.decoder import Decoder
from services.rollout.engine import Request
from services.trainer.learner import Learner
from services.trainer.packing import Group, Member
from services.trainer.warmup import warm_up
from slipstream import config, model, seeds
from slipstream.environment import Task, load
from slipstream.lifecycle import SystemClock, Waits
from slipstream.protos.types.v1 import policy_pb2
from slipstream.sample import FINISH_STOP, Sample, Segment


class Sampler:
    """Generates and scores a batch of groups."""

    def __init__(self, run: config.RunFile) -> None:
        self.run = run
        self.environment = load(run.environments[0].entry, run.environments[0].args)
        policy, self.tokenizer = model.build(run.model, run.run.seed, run.deterministic)
        self.decoder = Decoder(
            policy, run.rollout.slots, run.rollout.context, deterministic=run.deterministic, compiled=run.rollout.compile)
        self.stop = model.stop_token_ids(self.tokenizer, policy)

    def batch(self, k: int) -> list[Group]:
        """The groups of optimizer step k."""
        schedule, requests, resets = self.run.schedule, [], []
        for draw in range((k - 1) * schedule.groups_per_batch, k * schedule.groups_per_batch):
            name, seed = self.run.environments[0].name, self.run.run.seed
            reset = self.environment.reset(Task(draw, seeds.task_seed(seed, name, draw), name))
            prompt = np.array(self.tokenizer.encode(reset.text, add_special_tokens=False), np.int32)
            for i in range(schedule.group_size):
                resets.append((draw, i, reset.answer))
                requests.append(
                    Request(prompt, self.run.rollout.max_new_tokens, seeds.sample_seed(seed, draw, i), stop_token_ids=self.stop)
                )
        answers = self.decoder.decode(requests)
        groups: dict[int, list[Member]] = {}
        for (draw, i, right), request, answer in zip(resets, requests, answers, strict=True):
            tokens = np.concatenate([request.prompt, answer.tokens])
            segment = Segment(tokens, np.arange(len(tokens)) >= len(request.prompt), answer.logprobs, answer.spans)
            text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
            reward = float(text == right and answer.finish_reason == FINISH_STOP)
            groups.setdefault(draw, []).append(Member(i, Sample([segment], answer.finish_reason), reward))
        return [Group(draw, members) for draw, members in groups.items()]


def learner(run: config.RunFile) -> Learner:
    """A warmed-up learner."""
    made = Learner(run)

    async def inline(function, *arguments):
        return function(*arguments)

    asyncio.run(warm_up(made, run, Waits(SystemClock()), inline, asyncio.Event()))
    return made


def synchronous(run: config.RunFile, threads: int, log: Path) -> None:
    """Generate, train, generate, train, in one process."""
    trained = learner(run)
    torch.set_num_threads(threads)  # before the decoder chooses its kernels
    sampler = Sampler(run)
    for k in range(1, run.run.steps + 1):
        sampler.decoder.load(trained.weights(), policy_pb2.PolicyVersion(number=k, step=k - 1))
        figures = trained.step(sampler.batch(k), k)
        note(log, figures)


def two_processes(run: config.RunFile, lag: int, log: Path) -> None:
    """A generator process at most `lag` steps behind the trainer in this one."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=generate, args=(run, lag, there), daemon=True)
    child.start()
    trained = learner(run)
    here.send((0, [(t.name, t.dtype, t.shape, bytes(t.data)) for t in trained.weights()]))
    for k in range(1, run.run.steps + 1):
        figures = trained.step(here.recv(), k)
        here.send((k, [(t.name, t.dtype, t.shape, bytes(t.data)) for t in trained.weights()]))
        note(log, figures)
    child.join(30)


def generate(run: config.RunFile, lag: int, pipe: Connection) -> None:
    """The generator's side: the newest weights there are, and never older than `lag` steps."""
    torch.set_num_threads(1)
    sampler, newest = Sampler(run), -1
    for k in range(1, run.run.steps + 1):
        loaded = newest
        weights = None
        while newest < max(0, k - 1 - lag) or pipe.poll():
            newest, weights = pipe.recv()
        if newest > loaded and weights is not None:
            tensors = [model.RawTensor(name, dtype, shape, memoryview(data)) for name, dtype, shape, data in weights]
            sampler.decoder.load(tensors, policy_pb2.PolicyVersion(number=newest + 1, step=newest))
        pipe.send(sampler.batch(k))
    while newest < run.run.steps:
        newest, _ = pipe.recv()


def note(log: Path, figures: dict) -> None:
    """One step is done."""
    with log.open("a") as file:
        file.write(json.dumps({"time_unix": time.time(), "reward_mean": figures["reward_mean"]}) + "\n")


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file")
    parser.add_argument("log", type=Path)
    parser.add_argument("arrangement", choices=["sync", "two-processes"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lag", type=int, default=1)
    arguments = parser.parse_args()
    run = config.load(arguments.run_file)
    torch.set_num_threads(1)
    if arguments.arrangement == "sync":
        synchronous(run, arguments.threads, arguments.log)
    else:
        two_processes(run, arguments.lag, arguments.log)


if __name__ == "__main__":
    main()
