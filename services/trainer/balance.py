"""Auxiliary losses of the routers, with counts of the whole optimizer step.

    balance = 1/L sum_l E sum_e f_le P_le       f: assignments of expert e / N       P: sum of softmax(router logits)_e / N
    z       = 1/L sum_l sum_n logsumexp(logits_ln)^2 / N

(Switch Transformer, arXiv 2101.03961, eq. 4 to 6; z: ST-MoE, arXiv 2202.08906, eq. 5.) N: tokens of the step without padding.
f has no gradient, so with f and N of the whole step the parts of the micro-batches add up to the loss of the whole batch, value
and gradient, however it is cut; a mean of the micro-batches' own losses would be another loss. f is known only after every
forward pass: with more than one micro-batch a pass without gradient counts first. Per layer: balance over all layers together,
which transformers' load_balancing_loss_func computes, lets one layer's neglected expert be another's favourite. With one layer
the two are equal; perfect balance gives K.

f counts what the experts were given, replayed routes included.

Axes: N tokens, L MoE layers, E experts, K experts per token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from services.trainer.expert_load import ExpertLoad
from services.trainer.packing import Microbatch
from services.trainer.ranks import Alone
from slipstream import config
from slipstream.errors import ConfigError
from slipstream.router_precision import router_modules


def balance_part(logits_n_E: torch.Tensor, assigned_E: torch.Tensor, tokens: int) -> torch.Tensor:
    """E sum_e f_e P_e of one layer, of some of the step's tokens: their part of P against the whole step's f. A scalar."""
    share_E = assigned_E.to(logits_n_E.dtype) / tokens
    return logits_n_E.shape[-1] * (share_E * logits_n_E.softmax(-1).sum(0)).sum() / tokens


def z_part(logits_n_E: torch.Tensor, tokens: int) -> torch.Tensor:
    """sum_n logsumexp(logits_n)^2 / N of some of the step's tokens. A scalar."""
    return logits_n_E.logsumexp(-1).square().sum() / tokens


class Balance:
    """The auxiliary losses of a run. Off, and without hooks, when both coefficients are 0.

    Raises ConfigError, naming the model's class, when its family has no such loss in transformers.
    """

    def __init__(self, model: Any, settings: config.Algorithm, load: ExpertLoad, ranks: Alone) -> None:
        self._settings, self._load, self._ranks, self._tokens = settings, load, ranks, 0
        self._assigned_L_E: list[torch.Tensor] = []
        self._logits: list[torch.Tensor] | None = None
        self._sums = [0.0, 0.0]
        self.on = bool(settings.balance_coefficient or settings.router_z_coefficient)
        if self.on:
            for router, index in _routers(model, load.layers):
                router.register_forward_hook(self._hook(index))

    def begin(self, batches: Sequence[Microbatch], forward: Callable[[Microbatch], object]) -> None:
        """A step begins. Counts assignments beforehand when the step is cut; else its only forward pass does."""
        self._sums, self._assigned_L_E = [0.0, 0.0], []
        if not self.on:
            return
        self._tokens = int(self._ranks.total(sum(int(b.lengths.sum()) for b in batches if b.lengths is not None)))
        if self._settings.balance_coefficient and len(batches) > 1:
            self._load.begin()
            with torch.no_grad():
                for batch in batches:
                    with self._load.counting(self._ranks.part(batch)):
                        forward(batch)
            self._assigned_L_E = [counts.clone() for counts in self._load.tokens()]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """The forward pass that `part` belongs to, and whose graph it extends, runs inside."""
        self._logits = [] if self.on else None
        yield

    def part(self, batch: Microbatch) -> torch.Tensor | float:
        """The losses' part of the micro-batch that has just run, times the coefficients."""
        if not self._logits or batch.lengths is None:
            return 0.0
        logits, self._logits = self._logits, None
        rows, width = batch.inputs.shape
        device = logits[0].device
        lengths_R = torch.from_numpy(batch.lengths).to(device)
        real_N = (torch.arange(width, device=device) < lengths_R[:, None]).reshape(rows * width)
        assigned = self._assigned_L_E or self._load.tokens()
        total = torch.zeros((), device=device)
        for layer, logits_N_E in enumerate(logits):
            logits_n_E = logits_N_E.reshape(rows * width, -1)[real_N]
            logits_n_E = logits_n_E if logits_n_E.dtype == torch.float64 else logits_n_E.float()
            balance = balance_part(logits_n_E, assigned[layer], self._tokens) / len(logits)
            z = z_part(logits_n_E, self._tokens) / len(logits)
            self._sums[0] += balance.item()
            self._sums[1] += z.item()
            total = total + self._settings.balance_coefficient * balance + self._settings.router_z_coefficient * z
        return total

    def metrics(self) -> dict[str, float]:
        """balance_loss (K = perfect balance, E = collapse) and router_z_loss of the step, without coefficients."""
        if not self.on:
            return {}
        [sums] = self._ranks.summed([torch.tensor(self._sums, dtype=torch.float64)])
        return {"balance_loss": float(sums[0]), "router_z_loss": float(sums[1])}

    def loss(self, found: dict[str, float]) -> float:
        """What `metrics` is worth in the step's loss."""
        weights = {"balance_loss": self._settings.balance_coefficient, "router_z_loss": self._settings.router_z_coefficient}
        return sum(weights[name] * value for name, value in found.items())

    def _hook(self, index: int) -> Any:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            if self._logits is not None and torch.is_grad_enabled():
                self._logits.append(output[index] if isinstance(output, tuple) else output)

        return keep


def _routers(model: Any, layers: int) -> list[tuple[nn.Module, int]]:
    """Modules whose output holds the router's logits, in the order of layers, and where in it: as transformers records them."""
    name = type(model).__name__
    wanted = "algorithm.balance_coefficient and router_z_coefficient"
    if not hasattr(model.config.get_text_config(), "router_aux_loss_coef"):
        raise ConfigError(
            f"{name} has no router_aux_loss_coef: transformers defines no auxiliary loss for its routers (a selection bias "
            f"keeps such families in balance, and it is frozen in RL); set {wanted} = 0")
    found = router_modules(model)
    if len(found) != layers:
        raise ConfigError(
            f"{name} has {len(found)} routers for {layers} layers of experts that transformers' experts interface can see; "
            f"set {wanted} = 0")
    return found
