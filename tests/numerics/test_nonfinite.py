"""A loss or gradient that is not finite: the step changes nothing, whose it was is known, and the run goes on the same."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer import nonfinite
from services.trainer.learner import Learner
from services.trainer.nonfinite import Culprit, Skip, SkipRecord
from services.trainer.packing import Group, microbatches, trained_rows
from services.trainer.replay import Replay, published, replay
from slipstream import batch_log, rpc
from slipstream.errors import ConfigError
from slipstream.objects import FileStore
from slipstream.sample import crc32c, encode
from tests.fake_buffer import FakeBuffer
from tests.trainer_samples import OBJECTIVE, groups, run_file
from tests.unit.test_trainer_loop import Start, lines, train, versions

BAD = 11  # a token of one sample alone


def learner(**trainer: Any) -> Learner:
    return Learner(run_file(trainer={"tokens_per_microbatch": 40, **trainer}))


def batch_with_one_bad(step: int = 0) -> list[Group]:
    """The first token of draw 2, sample 3 is BAD, and no other token is."""
    found = groups(seed=5, step=step)
    for group in found:
        for member in group.members:
            tokens = member.sample.segments[0].tokens
            tokens[tokens == BAD] = 3
    found[2].members[3].sample.segments[0].tokens[0] = BAD
    return found


def everything(made: Learner) -> list[torch.Tensor]:
    now = made.snapshot()
    return [*now.weights.values(), *now.optimizer.values(), *now.random.values()]


def forward_is_broken(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    return torch.where((inputs[0] == BAD)[..., None], math.inf, output)


def backward_is_broken(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda grad: torch.where((inputs[0] == BAD)[..., None], math.nan, grad))


@pytest.mark.parametrize(("break_it", "what", "packing"), [
    (forward_is_broken, "loss", "rows"), (backward_is_broken, "gradient", "rows"), (forward_is_broken, "loss", "packed")])
def test_the_step_is_skipped_and_its_sample_named(break_it, what, packing):
    """Weights, moments and random state stay as they are to the bit; of 16 samples exactly the broken one is named; the next
    step is that of a trainer that had a batch without signal instead."""
    made, other = learner(packing=packing), learner(packing=packing)
    for each in (made, other):
        each.step(groups(seed=4), 1)
    before = everything(made)
    handle = made.model.get_input_embeddings().register_forward_hook(break_it)
    metrics = made.step(batch_with_one_bad(), 2)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(made), strict=True))
    assert all(p.grad is None for p in made.model.parameters())
    assert made.skip == Skip([Culprit(2, 3, 0, what)])
    assert metrics["skipped"] == 1 and metrics["nonfinite_samples"] == 1 and metrics["trained_tokens"] == 0
    assert metrics["samples"] == 16, "it is counted as any batch"
    json.dumps(metrics, allow_nan=False)
    handle.remove()
    other.step(groups(seed=5, rewards=(1,)), 2)
    for each in (made, other):
        assert each.step(groups(seed=6), 3)["skipped"] == 0
    assert made.skip is None
    assert all(torch.equal(a, b) for a, b in zip(everything(made), everything(other), strict=True))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_recorded_log_probability_that_is_not_finite(value):
    """The buffer refuses such a sample; one that comes all the same is found before a forward pass is spent on it."""
    made, batch = learner(), groups()
    segment = batch[1].members[2].sample.segments[0]
    segment.logprobs[-1] = value
    before = everything(made)
    made.policy.forward = None  # pyright: ignore
    assert made.step(batch, 1)["skipped"] == 1
    assert made.skip == Skip([Culprit(1, 2, 0, "record")])
    assert all(torch.equal(a, b) for a, b in zip(before, everything(made), strict=True))


def test_weights_that_are_not_finite_are_named_and_no_sample_is():
    """An infinite weight makes every sample's loss NaN: blaming the samples would mislead."""
    made = learner()
    with torch.no_grad():
        made.model.get_output_embeddings().weight[3] = math.inf
    assert made.step(groups(), 3)["skipped"] == 1
    assert made.skip is not None and made.skip.weights == "lm_head.weight" and not made.skip.culprits
    assert "the weights themselves are not finite, first lm_head.weight" in made.skip.sentence


def test_a_sum_that_overflows_names_the_whole_micro_batch():
    """Rows that are finite one by one, and not together: all of that micro-batch, none of the others."""
    made = learner()
    rows = trained_rows(groups(), 1, OBJECTIVE)
    batches = microbatches(rows, 40)
    wide = next(b for b in batches if len(b.inputs) > 1)

    def loss(batch):
        total = next(made.model.parameters()).sum()
        return total * (math.inf if len(batch.inputs) == len(wide.inputs) and np.array_equal(batch.inputs, wide.inputs) else 1)

    found = nonfinite.search(rows, batches, loss, made.model, made.ranks)
    assert len(found.culprits) == len(wide.inputs) and {c.what for c in found.culprits} == {"sum"}


def test_the_limit_ends_the_trainer_with_a_sentence(tmp_path):
    """Two in a row are survived, an applied step starts the count anew, the third in a row ends it; each has its line."""
    (tmp_path / "audit").mkdir()
    record, skip = SkipRecord(tmp_path, 3), Skip([Culprit(31, 4, 0, "loss")])
    for step, found in enumerate((skip, skip, None, skip, skip), 1):
        record.judge(found, step, 2)
    with pytest.raises(ConfigError, match="last 3 steps, 4 to 6, .* draw 31, sample 4, segment 0 .loss.*fork .* at step 3"):
        record.judge(skip, 6, 2)
    kept = lines(record.path)
    assert [line["batch"] for line in kept] == [1, 2, 4, 5, 6]
    assert kept[0] == {"batch": 1, "incarnation": 2, "log": batch_log.log_key(1), "weights": "",
                       "samples": [{"draw": 31, "sample": 4, "segment": 0, "what": "loss"}]}


class Planted(FakeBuffer):
    """Batches whose draw 1, sample 1 has a NaN among its log-probabilities."""

    bad: tuple[int, ...] = (2,)

    def groups(self, batch: int) -> list[Group]:
        found = super().groups(batch)
        if batch in self.bad:
            found[1].members[1].sample.segments[0].logprobs[0] = math.nan
        return found

    async def log(self, store: FileStore) -> None:
        """The batch log as the real buffer writes it."""
        for number in range(1, self.steps + 1):
            batch, bodies = self._composition(number), [encode(m.sample) for g in self.groups(number) for m in g.members]
            offset = 0
            for member, body in zip((m for g in batch.groups for m in g.members), bodies, strict=True):
                member.body.offset, member.body.size, offset = (1 << 20) + offset, len(body), offset + len(body)
            header = batch.SerializeToString()
            head = batch_log.HEAD.pack(batch_log.MAGIC, len(header), crc32c(header), 0) + header
            await store.put(batch_log.log_key(number), head.ljust(1 << 20, b"\0") + b"".join(bodies))


async def test_run_resume_and_replay_agree(tmp_path: Path):
    """Batch 2 is skipped: version 2 has the weights of version 1, every batch is leased, committed and counted once; a trainer
    that is stopped and resumed comes to the same weights, and a replay of the log to every published version."""
    whole, parts = Planted(), Planted()  # pyright: ignore[reportAbstractUsage]
    assert await train(whole, run_file(str(tmp_path / "whole"))) == 0
    assert [e[1] for e in whole.kinds("commit")] == [2, 4]
    found = await versions(whole, tmp_path / "whole")
    assert found[2] == found[1] != found[3]
    assert [line["skipped"] for line in lines(tmp_path / "whole" / "metrics.jsonl")] == [0, 1, 0, 0]
    [kept] = lines(tmp_path / "whole" / "audit" / "nonfinite.jsonl")
    assert kept["batch"] == 2 and kept["samples"] == [{"draw": 1, "sample": 1, "segment": 0, "what": "record"}]

    run = run_file(str(tmp_path / "parts"), trainer={"checkpoint_every": 100})
    async with rpc.Server("127.0.0.1", 0, parts.registrations) as server:
        first = Start(run, server.address)
        parts.on_event = lambda e: first.lifecycle.request_stop("SIGTERM") if e[:2] == ("publish", 2) else None
        parts.gate = lambda batch: "held" if batch > 2 else ""
        assert await first.code == 0
        parts.gate = lambda batch: ""
        assert await Start(run, server.address).code == 0
    assert await versions(parts, tmp_path / "parts") == found

    store = FileStore(tmp_path / "whole" / "objects")
    await whole.log(store)
    report = await replay(
        Replay(run_file(str(tmp_path / "whole")), store), await published(tmp_path / "whole", store), 4, lambda text: None)
    assert report.sentence == "replayed 4 batches, 4 versions equal"


async def test_skips_in_a_row_are_counted_over_a_restart(tmp_path: Path):
    """Batches 2 and 3 before a stop, 4 after it: the third in a row ends the run with exit code 2, though it is the first that
    this process saw; its checkpoint knows of the others."""
    buffer, run = Planted(), run_file(str(tmp_path))  # pyright: ignore[reportAbstractUsage]
    buffer.bad = (2, 3, 4)
    async with rpc.Server("127.0.0.1", 0, buffer.registrations) as server:
        first = Start(run, server.address)
        buffer.on_event = lambda e: first.lifecycle.request_stop("SIGTERM") if e[:2] == ("publish", 3) else None
        buffer.gate = lambda batch: "held" if batch > 3 else ""
        assert await first.code == 0
        buffer.gate = lambda batch: ""
        second = Start(run, server.address)
        assert await second.code == 2
        assert second.loop.skips.in_a_row == 3
    assert [line["batch"] for line in lines(tmp_path / "audit" / "nonfinite.jsonl")] == [2, 3, 4]
    assert dataclasses.asdict(second.loop.learner.skip) == {  # pyright: ignore
        "culprits": [{"draw": 1, "sample": 1, "segment": 0, "what": "record"}], "weights": "", "part": ""}
