"""Everything that a step changes, as named CPU tensors: taken between two steps, written beside the next, put back at a start.

Names: weights and critic `<parameter>`; optimizer and critic_optimizer `<parameter>/<moment>`; random `<rank>/<generator>`.
Tensors of a sharded model are
DTensors and hold this rank's shard; taking a snapshot copies from device to host and does nothing else.

The generator is torch's. numpy's and Python's global ones are used by nothing in the trainer: every other random choice is a
function of (run seed, purpose, counter), see slipstream.seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor, zeros

from slipstream.errors import InvalidInput

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
MASTER = "master"  # beside them where the parameter has fewer than 32 bits
PARTS = ("weights", "optimizer", "random", "critic", "critic_optimizer")

Tensors = dict[str, torch.Tensor]
Learning = tuple[nn.Module, torch.optim.Optimizer]
# Where a tensor of a checkpoint goes: (part, name, global shape, dtype) -> a tensor, maybe a DTensor; None = not wanted.
Allocate = Callable[[str, str, torch.Size, torch.dtype], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a checkpoint holds, as seen by one rank."""

    weights: Tensors
    optimizer: Tensors
    random: Tensors
    critic: Tensors = field(default_factory=dict)  # empty without one
    critic_optimizer: Tensors = field(default_factory=dict)


def take(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0, critic: Learning | None = None) -> Snapshot:
    """A copy of everything."""
    learnt = (_copies(*critic), _moments(*critic)) if critic else ()
    return Snapshot(_copies(model, optimizer), _moments(model, optimizer), {f"{rank}/torch": torch.get_rng_state()}, *learnt)


@torch.no_grad()
def restore(
    model: nn.Module, optimizer: torch.optim.Optimizer, snapshot: Snapshot, rank: int = 0, critic: Learning | None = None,
    copy: bool = True,
) -> None:
    """The inverse of `take`, all or nothing: every check precedes the first write. Raises InvalidInput when it does not fit.

    Without `copy` the moments of the snapshot become the optimizer's own, where they are on its device.

    A rank that the snapshot does not know (it is of a smaller mesh) keeps its generator as it is; so does a critic.
    """
    parts = [(model, optimizer, snapshot.weights, _checked(model, snapshot.weights, snapshot.optimizer))]
    if critic and snapshot.critic:
        state = _checked(critic[0], snapshot.critic, snapshot.critic_optimizer)
        parts.append((*critic, snapshot.critic, state))
    for part in parts:
        _write(*part, copy)
    if (generator := snapshot.random.get(f"{rank}/torch")) is not None:
        torch.set_rng_state(generator.clone())


def _copies(model: nn.Module, _: torch.optim.Optimizer) -> Tensors:
    return {name: _copied(tensor) for name, tensor in named(model).items()}


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    return {f"{name}/{moment}": _copied(optimizer.state[parameter][moment])
            for name, parameter in model.named_parameters() if parameter in optimizer.state
            for moment in (*MOMENTS, MASTER) if moment in optimizer.state[parameter]}


def _checked(model: nn.Module, saved: Tensors, moments: Tensors) -> dict[str, Tensors]:
    """The optimizer's state by parameter. Raises InvalidInput when weights or state are not of this model."""
    weights, parameters = named(model), dict(model.named_parameters())
    if weights.keys() != saved.keys():
        missing, unexpected = weights.keys() - saved.keys(), saved.keys() - weights.keys()
        raise InvalidInput(
            f"the checkpoint is of another model: it lacks {sorted(missing)[:3]} and has {sorted(unexpected)[:3]}", "MODEL")
    for name, tensor in saved.items():
        _check(f"weights {name}", tensor, weights[name].shape)
    state: dict[str, Tensors] = {}
    for key, tensor in moments.items():
        name, _, moment = key.rpartition("/")
        if name not in parameters or moment not in (*MOMENTS, MASTER):
            raise InvalidInput(f"optimizer state {key} belongs to no parameter of the model", "OPTIMIZER_STATE")
        _check(f"optimizer state {key}", tensor, torch.Size() if moment == "step" else parameters[name].shape)
        state.setdefault(name, {})[moment] = tensor
    if partial := next((name for name, found in state.items() if not found.keys() >= {*MOMENTS}), None):
        raise InvalidInput(f"optimizer state of {partial} is incomplete", "OPTIMIZER_STATE")
    return state


def _write(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Tensors, state: dict[str, Tensors], copy: bool) -> None:
    weights, parameters = named(model), dict(model.named_parameters())
    for name, tensor in saved.items():
        if tensor is not weights[name]:
            weights[name].copy_(tensor)
    optimizer.state.clear()
    for name, moments in state.items():
        parameter = parameters[name]
        for moment, tensor in moments.items():  # the step count stays on the host, where AdamW keeps it
            place = "cpu" if moment == "step" else parameter.device
            optimizer.state[parameter][moment] = tensor.to(place, copy=copy)


def whole(part: str, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Allocate: every tensor in full, for one process."""
    return torch.empty(shape, dtype=dtype)


def shards_of(model: nn.Module, rank: int) -> Allocate:
    """Allocate: this rank's shards, laid out as the model's parameters are; of the random states only its own."""
    layouts: Mapping[str, torch.Tensor] = named(model)

    def allocate(part: str, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        if part == "random" and not name.startswith(f"{rank}/"):
            return None
        like = layouts.get(name if part == "weights" else name.rpartition("/")[0])
        if isinstance(like, DTensor) and shape == like.shape:
            return zeros(shape, dtype=dtype, device_mesh=like.device_mesh, placements=like.placements)
        return torch.empty(shape, dtype=dtype)

    return allocate


def named(model: nn.Module) -> Tensors:
    """The state of a model by name, not copied. Tied weights appear once, under their first name."""
    seen: set[int] = set()
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if not (id(tensor) in seen or seen.add(id(tensor)))}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _check(what: str, tensor: torch.Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape:
        raise InvalidInput(f"{what}: shape {list(tensor.shape)} is not the model's {list(shape)}", "SHAPE")
