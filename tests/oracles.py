"""Functions of TRL and verl as they are published, to compare ours with. Development only.

Both packages lie unimported in <environment>/oracles (pip --target, without their dependencies: ray, accelerate, ...). The
functions are cut out of the source files and compiled as they stand, without decorators and with annotations unevaluated.

    verl().agg_loss(...)
    trl_loss(loss_type="dapo", ...)
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

FOLDER = Path(sys.prefix, "oracles")
VERSIONS = {"trl": "1.16.0", "verl": "0.9.1"}


def cut_out(path: str, names: Iterable[str] | None, namespace: dict[str, Any]) -> dict[str, Any]:
    """Functions and methods of a source file by name, compiled into `namespace`; None: all top-level ones, and constants."""
    tree = ast.parse((FOLDER / path).read_text())
    if names is None:
        found: list[Any] = [
            node for node in tree.body if isinstance(node, ast.FunctionDef)
            or (isinstance(node, ast.Assign | ast.AnnAssign) and re.match("[A-Z_]+\\b", ast.unparse(node)))]
    else:
        wanted = set(names)
        found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in wanted]
    for node in found:
        node.decorator_list = []
    code = compile(ast.Module(found, []), path, "exec", flags=annotations.compiler_flag)
    exec(code, namespace)
    return namespace


class Config(SimpleNamespace):
    """Stands for verl's ActorConfig and AlgoConfig: attributes, and `get`."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


@functools.cache
def verl() -> SimpleNamespace:
    """verl's core algorithms."""
    _check("verl")
    functional = SimpleNamespace(**cut_out(
        "verl/utils/torch_functional.py", ("masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value"),
        {"torch": torch}))
    names = {
        "torch": torch, "np": np, "defaultdict": defaultdict, "verl_F": functional, "ActorConfig": Config,
        "AlgoConfig": type("AlgoConfig", (), {}), "as_torch_index": None}
    found = cut_out("verl/trainer/ppo/core_algos.py", None, names)
    correction = cut_out("verl/trainer/ppo/rollout_corr_helper.py", None, {
        "torch": torch, "math": math, "verl_F": functional})
    return SimpleNamespace(**found, correction=SimpleNamespace(**correction))


def trl_loss(
    logprobs: torch.Tensor, old: torch.Tensor | None, advantages: torch.Tensor, mask: torch.Tensor, *, loss_type: str,
    importance_sampling_level: str = "token", reference: torch.Tensor | None = None, beta: float = 0.0, **settings: Any,
) -> torch.Tensor:
    """The loss that GRPOTrainer computes from these per-token log-probabilities, all [B, T]."""
    _check("trl")
    names = cut_out("trl/trainer/grpo_trainer.py", ("_compute_loss", "get_off_policy_mask"), {
        "torch": torch, "nanmin": torch.min, "nanmax": torch.max})
    numbers = dict(delta=None, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, use_bias_correction_kl=False,
                   steps_per_generation=1) | settings
    trainer = SimpleNamespace(
        args=SimpleNamespace(**numbers), aux_loss_enabled=False, top_entropy_quantile=1.0,
        off_policy_mask_threshold=settings.get("off_policy_mask_threshold"),
        importance_sampling_level=importance_sampling_level, beta=beta, loss_type=loss_type,
        epsilon_low=settings.get("epsilon_low", 0.2),
        epsilon_high=settings.get("epsilon_high", 0.28), use_vllm=False, model=SimpleNamespace(training=True),
        vllm_importance_sampling_correction=False, current_gradient_accumulation_steps=1,
        max_completion_length=settings.get("max_completion_length", mask.shape[1]), _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        get_off_policy_mask=names["get_off_policy_mask"])
    inputs = dict(
        prompt_ids=torch.zeros(len(mask), 1), prompt_mask=torch.ones(len(mask), 1), completion_ids=torch.zeros_like(mask),
        completion_mask=mask, advantages=advantages, old_per_token_logps=old, num_items_in_batch=mask.sum())
    if reference is not None:
        inputs["ref_per_token_logps"] = reference
    return names["_compute_loss"](trainer, None, inputs)


def trl_divergence(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """The loss of GKDTrainer from logits [B, T, V], summed: beta = 1 is KL(student || teacher)."""
    _check("trl")
    found = cut_out("trl/experimental/gkd/gkd_trainer.py", ("generalized_jsd_loss",), {
        "torch": torch, "F": torch.nn.functional})
    return found["generalized_jsd_loss"](student, teacher, beta=beta, reduction="sum")


def _check(package: str) -> None:
    """Fail, not skip, when the oracle is absent or another version: `make test` installs it."""
    distributions = importlib.metadata.distributions(name=package, path=[str(FOLDER)])
    found = next((d.version for d in distributions), "none")
    assert found == VERSIONS[package], f"{FOLDER} has {package} {found}, not {VERSIONS[package]}: run `make test` once"
