"""The arms of benchmarks.speculation, run by the interpreter that has vLLM: `METHOD TOKENS SIZES REPEATS`, JSON at the end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engines_vllm import cpu_s
from services.rollout.engine import Request
from services.rollout.vllm_engine import VllmEngine
from slipstream import config
from slipstream.model import build, files, state
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion

CONTEXT, COUNTED, ROUND, GROUP = 96, 64, 64, 8  # tokens; new tokens of a count; requests of a round at least, of a prompt
STEPS, ROWS, RATE = 80, 48, 4e-3  # of the model's short schooling
EOS = "<eos>"
Row = tuple[str, str]  # prompt, answer


def sort(chance: random.Random) -> Row:
    """The demo's task: up to nine tokens, which repeat next to nothing."""
    digits = chance.choices("0123456789", k=chance.randint(4, 8))
    return "".join(digits) + "=", "".join(sorted(digits)) + EOS


def count(chance: random.Random) -> Row:
    """Repetitive: digits upwards, round and round, from anywhere."""
    first = chance.randrange(10)
    text = "".join(str((first + i) % 10) for i in range(12 + COUNTED))
    return text[:12], text[12:]


TASKS = {"sort": sort, "count": count}


def run_file(slots: int, method: str = "off", tokens: int = 4) -> config.RunFile:
    """The demo on vLLM with longer contexts; up to `tokens` guessed at once by `method`."""
    changed = ["rollout.engine=vllm", f"rollout.context={CONTEXT}", f"rollout.slots={slots}", "schedule.deterministic=false",
               f"model.build.config.max_position_embeddings={CONTEXT}", f"rollout.speculation.method={method}",
               f"rollout.speculation.tokens={tokens}"]
    return config.load(Path(__file__).parents[1] / "examples" / "sort-digits" / "run.toml", changed)


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def school(model: Any, tokenizer: Any) -> None:
    """Supervised steps on both tasks, so that the policy has something to repeat."""
    chance, optimizer = random.Random(0), torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    model.train()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20)
        for task, rows in ((sort, ROWS), (count, ROWS // 6)):
            drawn = [task(chance) for _ in range(rows)]
            longest = max(len(ids(tokenizer, prompt + answer)) for prompt, answer in drawn)
            tokens, labels = torch.zeros(rows, longest, dtype=torch.long), torch.full((rows, longest), -100)
            for i, (prompt, answer) in enumerate(drawn):
                row, begins = ids(tokenizer, prompt + answer), len(ids(tokenizer, prompt))
                tokens[i, : len(row)] = torch.tensor(row)
                labels[i, begins : len(row)] = tokens[i, begins : len(row)]
            model(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def lots(task: str, tokenizer: Any, size: int, repeat: int) -> list[list[Request]]:
    """ROUND requests or more in groups of one prompt, `size` at a time."""
    chance, count = random.Random(f"{task} {size} {repeat}"), max(size, ROUND)
    stop, most = (tuple(ids(tokenizer, EOS)), 12) if task == "sort" else ((), COUNTED)
    prompts = [np.asarray(ids(tokenizer, TASKS[task](chance)[0]), np.int32) for _ in range(-(-count // GROUP))]
    made = [Request(prompts[i // GROUP], most, seed=repeat << 20 | i, stop_token_ids=stop) for i in range(count)]
    return [made[i : i + size] for i in range(0, len(made), size)]


async def tokens_per_cpu_s(engine: VllmEngine, work: list[list[Request]]) -> float:
    started, made = cpu_s(), 0
    for lot in work:
        made += sum(len(answer.tokens) for answer in await asyncio.gather(*(engine.generate(request) for request in lot)))
    return made / (cpu_s() - started)


async def measured(method: str, tokens: int, sizes: list[int], repeats: int) -> dict[str, object]:
    """Of each task and size: tokens per CPU-second of this process and vLLM's, and what became of guesses."""
    runs = {"off": run_file(max(sizes)), "on": run_file(max(sizes), method, tokens)}
    torch.set_num_threads(1)
    model, tokenizer = build(runs["off"].model, 0)
    school(model, tokenizer)
    engines = {name: VllmEngine(run) for name, run in runs.items()}
    speeds: dict[tuple[str, int, str], list[float]] = {}
    guesses: dict[tuple[str, int], np.ndarray] = {}
    try:
        for engine in engines.values():
            await engine.start(files(model, tokenizer), state(model), PolicyVersion(number=1))
        for repeat in range(-1, repeats):
            for size in sizes:
                for task in TASKS:
                    work, before = lots(task, tokenizer, size, repeat + 1), engines["on"].load.drafts
                    for name, engine in engines.items():
                        speed = await tokens_per_cpu_s(engine, work)
                        if repeat >= 0:  # the first is for warming up
                            speeds.setdefault((task, size, name), []).append(speed)
                    after = engines["on"].load.drafts
                    if repeat >= 0:
                        guesses.setdefault((task, size), np.zeros(3))[:] += np.subtract(
                            dataclasses.astuple(after), dataclasses.astuple(before))
    finally:
        for engine in engines.values():
            await engine.stop()
    import vllm  # pyright: ignore[reportMissingImports]

    arms = {f"{task}_{size}_{name}": statistics.median(values) for (task, size, name), values in speeds.items()}
    judged = {f"{task}_{size}": values.tolist() for (task, size), values in guesses.items()}
    return {"version": vllm.__version__, "cpu": arms, "guesses": judged}


if __name__ == "__main__":  # vLLM's process imports this file again
    print(json.dumps(asyncio.run(measured(
        sys.argv[1], int(sys.argv[2]), [int(s) for s in sys.argv[3].split(",")], int(sys.argv[4])))))
