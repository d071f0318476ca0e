"""Training with the sampler's routes: what is replayed, what is measured, and that wrong routes never reach the weights.

The sampler of these tests is the trainer's model with weights rounded to bfloat16: like a real engine it computes nearly the
same, and sends a few tokens elsewhere.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.rollout.routes import RouteCapture
from services.trainer.algorithms.objective import LossInputs
from services.trainer.batches import TrainingBatch, fetch_routes
from services.trainer.learner import Learner
from services.trainer.packing import Group, Member, microbatches, trained_rows
from slipstream.config import parse
from slipstream.errors import ConfigError, InvalidInput, NotFound
from slipstream.objects import FileStore
from slipstream.protos.types.v1 import sample_pb2, tensor_pb2
from slipstream.sample import Sample, Segment, crc32c, decode, encode, tensor
from tests.trainer_samples import OBJECTIVE, groups, run_file, segment

pytestmark = pytest.mark.slow

SHAPE = dict(
    hidden_size=48, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=64,
    initializer_range=0.25, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)


def learner(mode: str = "auto", seed: int = 0, **trainer: Any) -> Learner:
    build = {"model_type": "qwen3_moe", "tokenizer_chars": "0123456789=", "config": SHAPE}
    return Learner(run_file(
        run={"seed": seed}, model={"build": build}, algorithm={"route_replay": mode}, rollout={"capture_routes": True},
        trainer={"max_grad_norm": 1e9, **trainer}))


@functools.cache
def sampler() -> tuple[Any, RouteCapture]:
    model = learner().model
    return model, RouteCapture(model)


def sampled(made: Learner, batch: Sequence[Group], rounded: bool = True) -> list[Group]:
    """The groups with log-probabilities and routes of a sampler whose weights are `made`'s, rounded or not."""
    model, capture = sampler()
    model.load_state_dict(made.model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float() if rounded else parameter)

    def again(s: Segment) -> Segment:
        ids = torch.from_numpy(s.tokens).long()[None]
        with torch.no_grad(), capture:
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0]
        logprobs = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        return replace(s, logprobs=logprobs[s.loss_mask[1:]], routes=capture.take().numpy())

    return changed(batch, again)


def changed(batch: Sequence[Group], change: Callable[[Segment], Segment]) -> list[Group]:
    """The groups with every segment replaced."""
    def of(member: Member) -> Member:
        return replace(member, sample=Sample([change(s) for s in member.sample.segments]))

    return [replace(g, members=[of(m) for m in g.members]) for g in batch]


def routes_by(batch: Sequence[Group], change: Callable[[np.ndarray], np.ndarray | None]) -> list[Group]:
    """The groups with every segment's routes replaced."""
    return changed(batch, lambda s: replace(s, routes=change(s.routes)))  # pyright: ignore


def weights(made: Learner) -> bytes:
    return b"".join(bytes(t.data) for t in made.weights())


def batch(seed: int = 3, count: int = 8) -> list[Group]:
    """Groups of rows of many lengths, some of two segments."""
    found = groups(count, 4, seed)
    two = found[0].members[1]
    found[0].members[1] = Member(  # type: ignore[index]
        two.index, Sample([segment([3, 4, 5, 12], [6, 7, 1]), segment([2, 12], [9, 8, 7, 6, 1])]), two.reward)
    return found


def test_own_routes_give_the_same_step_to_the_bit():
    """Rows of many lengths in several padded micro-batches, one row a second segment: if any position got another's routes, or
    the gradient took another way, the new weights would differ."""
    made, plain = learner(tokens_per_microbatch=64), learner("none", tokens_per_microbatch=64)
    data = sampled(made, batch(), rounded=False)
    metrics, without = made.step(data, 1), plain.step(data, 1)
    assert metrics["microbatches"] > 3 and metrics["route_flip_share"] == 0
    assert metrics["loss"] == without["loss"] and weights(made) == weights(plain)
    assert without["route_flip_share"] is None and without["route_gap"] is None


def test_replay_brings_the_trainer_closer_to_the_sampler():
    """A few routes flip under rounding; with those of the sampler the log-probabilities are nearer. The figures agree with a
    count and forward passes made here."""
    made = learner()
    data = sampled(made, batch(count=16))
    live = sampled(made, data, rounded=False)
    pairs = [
        (a.routes, b.routes) for g, h in zip(data, live, strict=True) for m, n in zip(g.members, h.members, strict=True)
        for a, b in zip(m.sample.segments, n.sample.segments, strict=True)]
    differing = np.concatenate([(np.sort(np.asarray(a)) != np.sort(np.asarray(b))).any(-1) for a, b in pairs])
    rows = trained_rows(data, 1, OBJECTIVE)
    [whole] = microbatches(rows, 1 << 20)
    with torch.no_grad():
        gap = [float(np.abs(made.forward(b)[0].numpy() - b.behaviour).mean()) for b in (whole, replace(whole, routes=None))]
    metrics = made.step(data, 1)
    assert 0 < metrics["route_flip_share"] < 0.1
    assert metrics["route_flip_share"] == pytest.approx(differing.mean(), rel=0.35)  # a flip changes what later layers see
    assert (metrics["route_gap"], metrics["route_gap_live"]) == pytest.approx(gap, rel=1e-4)
    assert metrics["route_gap"] == pytest.approx(metrics["gap_mean"], rel=1e-4)
    assert metrics["route_gap"] < 0.8 * metrics["route_gap_live"]


WRONG: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "a token late": lambda r: np.roll(r, 1, axis=0), "a token early": lambda r: np.roll(r, -1, axis=0),
    "layers swapped": lambda r: r[:, [1, 0, 2]], "layers reversed": lambda r: r[:, ::-1],
}


@pytest.mark.parametrize(("name", "first"), [
    *((name, True) for name in WRONG), ("a token late", False), ("layers swapped", False)])
def test_misaligned_routes_are_refused_and_nothing_is_applied(name, first):
    """At the first step, and between two checks, where the share of flips gives them away; a good batch afterwards trains."""
    made, good = learner(), sampled(learner(), batch())
    if not first:
        made.step(good, 1)
        good = sampled(made, batch(4))
    before = weights(made)
    with pytest.raises(InvalidInput, match="not those of these tokens or layers") as caught:
        made.step(routes_by(good, WRONG[name]), 1 if first else 2)
    assert caught.value.reason == "ROUTES_MISALIGNED"
    assert weights(made) == before and all(p.grad is None for p in made.model.parameters())
    assert made.step(good, 3)["grad_norm"] > 0 and weights(made) != before


def test_the_check_runs_when_it_is_due():
    """At the first step and every tenth, not in between, where it would cost a forward pass."""
    made, given = learner(learning_rate=1e-5), batch()
    checked = [step for step in (7, 8, 10, 11, 20, 21) if made.step(sampled(made, given), step)["route_gap"] is not None]
    assert checked == [7, 10, 20]


def test_rows_without_routes():
    """auto trains them with live routes, and replays those of their neighbours; sampler refuses them by name."""
    mixed = sampled(made := learner(), batch())
    mixed = [*mixed[:4], *routes_by(mixed[4:], lambda _: None)]
    assert made.step(mixed, 1)["route_flip_share"] is not None
    with pytest.raises(InvalidInput, match="rollout.capture_routes = true"):
        learner("sampler").step(mixed, 1)
    assert learner("sampler").step(sampled(learner(), batch()), 1)["route_gap"] is not None
    assert learner().step(routes_by(mixed, lambda _: None), 1)["route_flip_share"] is None


def test_models_whose_routes_cannot_be_replayed(caplog):
    """auto says so once and trains; sampler is a configuration error at the start."""
    build = {"model_type": "phimoe", "tokenizer_chars": "0123456789=", "config": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4,
        "num_experts_per_tok": 2, "intermediate_size": 32, "max_position_embeddings": 64}}
    made = Learner(run_file(model={"build": build}))
    data = routes_by(changed(batch(), lambda s: replace(s, routes=np.zeros((len(s.tokens) - 1, 1, 2), np.uint8))), lambda r: r)
    assert made.step(data, 1)["route_flip_share"] is None and made.step(data, 2)["grad_norm"] > 0
    assert caplog.text.count("PhimoeForCausalLM") == 1
    with pytest.raises(ConfigError, match="PhimoeForCausalLM"):
        Learner(run_file(model={"build": build}, algorithm={"route_replay": "sampler"}, rollout={"capture_routes": True}))


def test_sparse_attention_is_refused_by_name(caplog):
    """It chooses among tokens as routers do among experts, and nobody records it. Within index_topk tokens it chooses all."""
    config = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "intermediate_size": 32, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 0, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "max_position_embeddings": 64, "index_topk": 16, "index_head_dim": 32, "index_n_heads": 2}
    model = {"build": {"model_type": "deepseek_v32", "tokenizer_chars": "0123456789=", "config": config}}

    def made(mode: str, context: int) -> Learner:
        return Learner(run_file(
            model=model, algorithm={"route_replay": mode}, rollout={"capture_routes": True, "context": context}))

    with pytest.raises(ConfigError, match="DeepseekV32ForCausalLM.*index_topk"):
        made("sampler", 32)
    made("auto", 32)
    assert caplog.text.count("index_topk") == 1
    made("sampler", 16)
    made("none", 32)
    assert caplog.text.count("index_topk") == 1


def test_contradictory_settings_are_refused():
    """Replay that is required, of routes that nobody records."""
    data = run_file().model_dump(mode="json")
    data["algorithm"]["route_replay"] = "sampler"
    with pytest.raises(ConfigError, match="algorithm.route_replay = sampler with rollout.capture_routes = false"):
        parse(data)


def test_the_router_learns_under_replay():
    """A step on routes that the router would not choose moves its weights, and not those of experts that nobody took."""
    made = learner("sampler")
    data = routes_by(sampled(made, batch()), lambda r: r % 7)
    data = routes_by(data, lambda r: np.where(r == r[..., ::-1], np.array([0, 1], np.uint8), r))
    rows = trained_rows(data, 1, OBJECTIVE)
    [whole] = microbatches(rows, 1 << 20)
    logprobs_M, entropy_M = made.forward(whole)
    made.objective.loss(LossInputs(
        logprobs_M, entropy_M, logprobs_M.detach(), torch.from_numpy(whole.advantages), torch.from_numpy(whole.weights),
        torch.from_numpy(whole.rows), torch.from_numpy(whole.lags))).backward()
    for layer in made.model.model.layers:
        assert float(layer.mlp.gate.weight.grad.abs().max()) > 1e-7
        used = [float(layer.mlp.experts.down_proj.grad[e].abs().max()) > 0 for e in range(8)]
        assert used == [True] * 7 + [False]


def by_reference(data: Sequence[Group], store: FileStore) -> list[Group]:
    """Routes in objects, each behind other bytes, as after a trip over the wire."""
    async def put(key: str, routes: np.ndarray) -> sample_pb2.Routes:
        wire = tensor(routes)
        await store.put(key, b"before" + wire.data + b"after")
        return sample_pb2.Routes(
            dtype=wire.dtype, shape=wire.shape,
            object=tensor_pb2.ObjectRef(key=key, offset=6, size=len(wire.data), crc32c=crc32c(wire.data)))

    def moved(s: Segment) -> Segment:
        assert s.routes is not None
        key = f"routes/{crc32c(s.tokens.tobytes() + s.routes.tobytes())}"
        return replace(s, routes=None, routes_ref=asyncio.run(put(key, s.routes)))

    return [
        replace(g, members=[replace(m, sample=decode(encode(m.sample))) for m in g.members]) for g in changed(data, moved)]


def test_routes_by_reference_are_fetched_and_checked(tmp_path):
    """They train as those that travel with the sample do; a damaged or lost object is named, with draw and sample."""
    store, made = FileStore(tmp_path), learner("sampler")
    data = sampled(made, batch())
    moved = by_reference(data, store)
    read = TrainingBatch(1, moved, [], 0, {}, {}, {})
    asyncio.run(fetch_routes(read, store))
    other = learner("sampler")
    assert made.step(data, 1)["loss"] == other.step(read.groups, 1)["loss"] and weights(made) == weights(other)

    moved = by_reference(data, store)
    reference = moved[2].members[1].sample.segments[0].routes_ref
    assert reference is not None
    path = tmp_path / reference.object.key
    whole = path.read_bytes()
    path.write_bytes(whole[:8] + bytes([whole[8] ^ 1]) + whole[9:])
    with pytest.raises(InvalidInput, match=r"draw 2, sample 1, segment 0.*routes/\d+ are not those that were recorded"):
        asyncio.run(fetch_routes(replace(read, groups=moved), store))
    path.unlink()
    with pytest.raises(NotFound, match="routes/"):
        asyncio.run(fetch_routes(replace(read, groups=moved), store))


def test_load_balance_bias_is_shipped_and_frozen():
    """It changes the choice and no gradient sees it: versions carry it, and a step leaves it as it is."""
    config = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "intermediate_size": 32, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 0, "max_position_embeddings": 64}
    made = Learner(run_file(model={"build": {"model_type": "glm4_moe", "tokenizer_chars": "0123456789=", "config": config}}))
    buffers = {n: b for n, b in made.model.named_buffers() if n.endswith("e_score_correction_bias")}
    [(name, bias)] = buffers.items()
    bias.normal_()
    before, gate = bias.clone(), made.model.model.layers[0].mlp.gate.weight.detach().clone()
    made.step(groups(), 1)
    [sent] = [t for t in made.weights() if t.name == name]
    assert torch.equal(bias, before) and bytes(sent.data) == before.numpy().tobytes()
    assert not torch.equal(made.model.model.layers[0].mlp.gate.weight, gate)
