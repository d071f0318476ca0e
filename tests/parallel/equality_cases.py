"""One batch trained by one process and by the ranks of a world, with each feature of a run file: gradients, figures, culprits.

In float64 throughout, so that nothing but the order of sums differs: 1e-12 is asked for.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from services.trainer.learner import Learner
from services.trainer.packing import Group, Member
from services.trainer.parallel import mesh
from services.trainer.parallel.learner import ShardedLearner
from services.trainer.supervised import prompt_and_answer
from slipstream import config
from slipstream.errors import InvalidInput
from slipstream.model import raw
from slipstream.sample import Sample, Segment
from tests.parallel import families
from tests.parallel.exact import exact
from tests.trainer_samples import CHARS, FAMILIES, groups, run_file

ROUTED = dict(rollout={"capture_routes": True})
# What the run file has besides. Recorded routes are random ones, which the live routers would hardly choose.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence_means": dict(algorithm={"preset": "gspo-moe"}),
    "reference": dict(algorithm={"kl": "k3", "kl_in": "loss", "kl_coefficient": 0.3}),
    "balance": dict(algorithm={"balance_coefficient": 0.3, "router_z_coefficient": 0.1}),
    "routes": ROUTED,
    "teacher": dict(algorithm={"teacher": "FOLDER", "advantage": "grpo"}),
    "everything": dict(ROUTED, algorithm={
        "kl": "k3", "kl_in": "loss", "kl_coefficient": 0.3, "entropy_coefficient": 0.05, "balance_coefficient": 0.3,
        "router_z_coefficient": 0.1, "teacher": "FOLDER", "advantage": "grpo"}),
    "adapter": dict(
        model={"lora": {"rank": 4, "targets": ["attention"]}}, algorithm={"kl": "k3", "kl_in": "loss", "kl_coefficient": 0.3}),
    "adapted_experts": dict(model={"lora": {"rank": 4}}),
    "critic": dict(
        algorithm={"preset": "ppo", "kl": "k1", "kl_in": "reward", "kl_coefficient": 0.3},
        critic={"learning_rate": 1e-3, "updates": 2}),
}
CASES["own_routes"] = dict(algorithm={"preset": "gspo-moe", "route_replay": "trainer"}, trainer={"minibatches": 2})
# The same with segments that share rows.
CASES |= {f"packed_{case}": CASES[case] | {"trainer": {"packing": "packed"} | CASES[case].get("trainer", {})} for case in (
    "everything", "critic", "sequence_means", "own_routes", "adapter")}
CASES["recomputed_adapter"] = CASES["adapter"]
CASES |= {  # no feature, another family
    family: dict(model={"build": {"model_type": family, "tokenizer_chars": CHARS, "config": shape}})
    for family, shape in families.FAMILIES.items() if family != "qwen3_moe"}
CASES["packed_linear"] = CASES["qwen3_next"] | {"trainer": {"packing": "packed"}}
# In float32: routers that stay so in a float64 model, where FSDP wants one type in a layer; layers that run again where `exact`
# does not reach.
SINGLE = ("deepseek_v3", "glm4_moe", "recomputed_adapter", "packed_linear")
METRICS = (
    "loss", "grad_norm", "entropy", "gap_mean", "k3", "clip_share", "ess", "trained_tokens", "reward_mean", "tokens", "skipped",
    "expert_load_max", "expert_load_mean", "dead_experts", "balance_loss", "router_z_loss", "route_flip_share",
    "value_loss", "value_mean", "explained_variance", "critic_grad_norm", "value_clip_share", "teacher_kl")


def run(
    case: str, parallel: dict[str, Any], folder: str = "", tokens: int = 48, seed: int = 0, **model: Any,
) -> config.RunFile:
    """Of a case, in float64 if the family can, with a head of keys and values for each of two tensor-parallel ranks; `model`
    configures it.
    """
    sections: dict[str, Any] = {name: dict(values) for name, values in CASES[case].items()}
    if "teacher" in sections.get("algorithm", {}):
        sections["algorithm"]["teacher"] = folder
    shape = FAMILIES["qwen3_moe"] | {"num_key_value_heads": 2} | model
    build = {"model_type": "qwen3_moe", "tokenizer_chars": CHARS, "config": shape}
    trainer = dict(learning_rate=1e-3, tokens_per_microbatch=tokens, max_grad_norm=0.05, parallel=parallel)
    trainer |= sections.pop("trainer", {})
    model_section = {"build": build, "experts": "batched_mm", **sections.pop("model", {})}
    found = run_file(model=model_section, trainer=trainer, run={"seed": seed}, **sections)
    dtype = "float32" if case in SINGLE else "float64"
    return found.model_copy(update={"model": found.model.model_copy(update={"dtype": dtype})})


def batch(case: str, number: int) -> list[Group]:
    """Of step `number`. In the first, one of two ranks has a micro-batch less than the other and idles; in the second, one of
    four.
    """
    found = groups(5, seed={1: 3, 2: 8}.get(number, number))
    if not CASES[case].get("rollout"):
        return found
    random = np.random.default_rng(number)

    def routed(segment: Segment) -> Segment:
        shape = (len(segment.tokens) - 1, 2)
        return dataclasses.replace(segment, routes=np.argsort(random.random((*shape, 4)))[..., :2].astype(np.uint8))

    return [dataclasses.replace(g, members=[
        Member(m.index, Sample([routed(s) for s in m.sample.segments]), m.reward) for m in g.members]) for g in found]


def teacher(folder: Path) -> str:
    """A model of the same vocabulary with other weights, as a directory."""
    made = Learner(run("plain", {}, seed=7))
    made.save_pretrained(folder)
    return str(folder)


def trained(learner: Any, case: str, steps: int = 2) -> dict[str, Any]:
    """Of any learner: gradients of the first update of policy and critic, as they are applied, metrics and weights."""
    gradients: dict[str, np.ndarray] = {}
    parts = [("", learner.model, learner.optimizer)]
    if learner.critic:
        with torch.no_grad():
            head = learner.critic.model.head.weight
            head.copy_(mesh.laid_out(torch.linspace(-1, 1, head.shape[1], dtype=head.dtype)[None], head))
        parts.append(("critic.", learner.critic.model, learner.critic.optimizer))
    if learner.adapter:
        for name, tensor in learner.adapter.named_parameters():  # B is 0 at first, and A without a gradient
            if "lora_B" in name:
                torch.nn.init.normal_(tensor, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    for prefix, model, optimizer in parts:
        optimizer.register_step_pre_hook(lambda *_, prefix=prefix, model=model: look(prefix, model, gradients))
    with exact():
        if learner.objective.kl_in_loss and not learner.adapter:  # another model than the policy, from rank 0
            other = learner.run.model_copy(update={"run": learner.run.run.model_copy(update={"seed": 7})})
            learner.start_reference(Learner(other).weights() if learner.ranks.share == 0 else None)
        elif learner.run.algorithm.kl != "none":
            learner.start_reference()
        metrics = [learner.step(batch(case, number), number) for number in range(1, steps + 1)]
    return {"gradients": gradients, "metrics": metrics, "weights": {t.name: bytes(t.data) for t in learner.weights()},
            "base": {t.name: bytes(t.data) for t in learner.base()}}


def again(learner: ShardedLearner, case: str) -> bool:
    """Whether a snapshot put back gives the same weights after one more step as going on does, and an adapter's directory holds
    them; rank 0 sees it.
    """
    found, snapshot = [], learner.snapshot()
    if learner.adapter:
        with tempfile.TemporaryDirectory() as folder:
            learner.save_pretrained(Path(folder) / "model")
            if learner.rank == 0:
                saved = load_file(Path(folder) / "model/adapter_model.safetensors")
                assert {name: raw(name, tensor) for name, tensor in saved.items()} == {t.name: t for t in learner.weights()}
    for _ in range(2):
        with exact():
            learner.step(batch(case, 9), 3)
        found.append([bytes(t.data) for t in learner.weights()])
        learner.load(snapshot)
    return found[0] == found[1]


def look(prefix: str, model: torch.nn.Module, gradients: dict[str, np.ndarray]) -> None:
    """Note each parameter's first gradient. Collective."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and prefix + name not in gradients:
            gradients[prefix + name] = mesh.whole(parameter.grad).detach().clone().numpy()


def world(jobs: Sequence[tuple[str, dict[str, Any]]], folder: str) -> list[Any]:
    """On a rank: what `trained` says of each job; a job of another name is a function of this module."""
    found = []
    for case, parallel in jobs:
        if case not in CASES:
            found.append(globals()[case](parallel))
            continue
        learner = ShardedLearner(run(case, parallel, folder))
        found.append(trained(learner, case) | {"again": again(learner, case)})
        learner.close()
    return found


def supervised(parallel: dict[str, Any]) -> dict[str, bytes]:
    """On a rank, or with one process: weights after two supervised steps, rank 0 having looked for a checkpoint."""
    learner = ShardedLearner(run("plain", parallel)) if parallel else Learner(run("plain", {}))
    if isinstance(learner, ShardedLearner):
        learner.probe()
        if learner.rank == 0:
            learner.allocate()
    rows = [prompt_and_answer([3, 4 + i % 3], [5, 6, 2][: 1 + i % 3]) for i in range(7)] if learner.ranks.share == 0 else []
    with exact():
        for number in range(2):
            learner.supervised_step(rows, 1e-3, f"step {number}")
    return {t.name: bytes(t.data) for t in learner.weights()}


def misled(parallel: dict[str, Any]) -> dict[str, Any]:
    """On a rank: what comes of routes of another model, of an expert twice, of other tokens; whether anything was applied."""
    sampler = Learner(run("routes", {}, initializer_range=0.3))
    learner = ShardedLearner(run("routes", parallel, initializer_range=0.3))
    before, told = [bytes(t.data) for t in learner.weights()], []
    for change in (lambda routes: routes + 3, lambda routes: routes[..., :1].repeat(2, -1), None):
        given = batch("routes", 1)
        segments = [m.sample.segments[0] for g in given for m in g.members]
        if change is None:  # as if the sampler had taken its own experts, and told of others
            given = [dataclasses.replace(g, members=[
                Member(m.index, Sample([spoken(sampler, m.sample.segments[0])]), m.reward) for m in g.members]) for g in given]
        else:  # one segment alone, so one rank alone sees it
            routes = segments[7].routes
            assert routes is not None
            routes[:] = change(routes)
        try:
            learner.step(given, 1)
            told.append("")
        except InvalidInput as error:
            told.append(error.reason)
    return {"told": told, "same": before == [bytes(t.data) for t in learner.weights()]}


@torch.no_grad()
def spoken(sampler: Learner, segment: Segment) -> Segment:
    """With the sampler's own log-probabilities, and the routes that it has."""
    ids = torch.from_numpy(segment.tokens).long()[None]
    logits = sampler.model(input_ids=ids[:, :-1], use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
    return dataclasses.replace(segment, logprobs=logprobs.float().numpy()[segment.loss_mask[1:]])


def broken(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """A forward hook on the embeddings: token 11 makes everything infinite."""
    return torch.where((inputs[0] == 11)[..., None], math.inf, output)


def broken_back(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    """The same of the gradient alone."""
    if output.requires_grad:
        output.register_hook(lambda grad: torch.where((inputs[0] == 11)[..., None], math.nan, grad))


def culprits(parallel: dict[str, Any]) -> list[Any]:
    """On a rank: who is named when one sample's loss, or gradient, is not finite; and whether the next step is a good one."""
    learner, found = ShardedLearner(run("plain", parallel)), []
    for hook in (broken, broken_back):
        given = batch("plain", 1)
        for group in given:
            for member in group.members:
                tokens = member.sample.segments[0].tokens
                tokens[tokens == 11] = 3
        given[2].members[3].sample.segments[0].tokens[0] = 11
        handle = learner.model.get_input_embeddings().register_forward_hook(hook)
        before = [t.data for t in learner.weights()]
        metrics = learner.step(given, 1)
        handle.remove()
        same = before == [t.data for t in learner.weights()]
        found.append((learner.skip, metrics["skipped"], metrics["nonfinite_samples"], same))
    found.append(learner.step(batch("plain", 2), 2)["skipped"])
    return found
