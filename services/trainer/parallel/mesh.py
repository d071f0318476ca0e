"""The model on many ranks: transformers' FSDP2 × EP × TP with our exchanges, and what must be done across its meshes.

Dense weights are sharded over `fsdp` = ranks / tensor, experts over `experts` ranks and, when there are more, once more over
the rest. Gradients arrive as sums over all ranks: the loss is multiplied by the number of shares that FSDP divides by.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.utils import initialize_distributed_mesh
from transformers.modeling_layers import GradientCheckpointingLayer

from services.trainer.optimizer import MasterAdamW, NonFinite
from services.trainer.parallel import context, cost, hangs
from services.trainer.parallel.baselines import AllGather, Copies
from services.trainer.parallel.context_attention import kept
from services.trainer.parallel.deep_ep import DeepEP
from services.trainer.parallel.deep_ep_checks import Demand, problems
from services.trainer.parallel.exchange import ExpertParallel
from services.trainer.parallel.experts import Exchanges, register
from services.trainer.parallel.fabric import INSTANCES, missing, nccl_version, preset
from services.trainer.parallel.flat import Flat
from services.trainer.parallel.hierarchical import Hierarchical
from services.trainer.parallel.topology import topology
from slipstream import config, logs
from slipstream.errors import ConfigError
from slipstream.model import experts_of

log = logs.get("trainer.parallel")
# It advises on the order of collectives, once for each tensor.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def join(settings: config.Parallel) -> torch.device:
    """Make this process a rank of the world that torchrun's variables describe. Returns its device."""
    seen = int(os.environ.get("WORLD_SIZE", "1"))
    if seen != settings.ranks:
        raise ConfigError(f"trainer.parallel.ranks = {settings.ranks}, but torchrun started {seen}: make them equal")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        _links(settings)
    if not dist.is_initialized():
        store, rank, ranks = _met(settings.start_timeout_s)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=ranks,
            timeout=timedelta(seconds=settings.collective_timeout_s), device_id=None if device.type == "cpu" else device)
        hangs.known(rank)
    return device


def _met(limit_s: float) -> tuple[Any, int, int]:
    """All ranks are here: from now on nobody waits longer than a collective's time-out, but for `met`."""
    limit = timedelta(seconds=limit_s)
    store, rank, ranks = next(iter(rendezvous("env://", timeout=limit)))
    store.set(f"ready/{rank}", "")
    store.wait([f"ready/{other}" for other in range(ranks)], limit)
    return store, rank, ranks


def background(settings: config.Parallel) -> dist.ProcessGroup:
    """All ranks, for what goes on beside the steps and takes longer than a collective may: starts and checkpoints."""
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=settings.start_timeout_s))
    return group


def met(group: dist.ProcessGroup, settings: config.Parallel) -> None:
    """Wait until every rank has filled its shards, however long its reading took. Raises RuntimeError naming who has not."""
    dist.monitored_barrier(group, timedelta(seconds=settings.start_timeout_s), wait_all_ranks=True)


def _links(settings: config.Parallel) -> None:
    """Set the preset of the instance type, where nobody has set another, and look whether the machine has the rest."""
    if not settings.instance_type or settings.exchange not in ("auto", "deep_ep"):
        return
    transport = settings.transport or None
    for name, value in preset(settings.instance_type, transport).items():
        os.environ.setdefault(name, value)
    found = missing(settings.instance_type, transport, os.environ, nccl=nccl_version())
    if found and settings.exchange == "deep_ep":
        raise ConfigError(f"trainer.parallel.exchange = deep_ep on {settings.instance_type}: " + "; ".join(found))
    for message in found:
        log.warning(f"EFA: {message}")


def plan(model: Any, run: config.RunFile, device: torch.device) -> tuple[DistributedConfig, Exchanges]:
    """What transformers is told of the mesh, and the exchanges that it will use. Raises ConfigError, as `fits` does."""
    settings = run.trainer.parallel
    fits(model, settings)
    exchanges = Exchanges(lambda group, experts, hidden, dtype: make(run, model, group, experts, hidden, device))
    name = f"slipstream_{settings.exchange}"
    if settings.experts > 1:
        register(name, exchanges)
    return DistributedConfig(
        tp_size=settings.tensor, fsdp_size=settings.ranks // settings.tensor, ep_size=settings.experts,
        ep_implementation=name if settings.experts > 1 else "auto"), exchanges


def distribute(model: Any, run: config.RunFile, device: torch.device) -> tuple[Any, Exchanges]:
    """Shard a model that every rank has built alike. Raises ConfigError for what its family or the mesh cannot do."""
    wanted, exchanges = plan(model, run, device)
    model = apply(model.to(device), run, wanted)
    if run.trainer.parallel.recompute:
        recompute(model)
    return model, exchanges


def apply(model: Any, run: config.RunFile, wanted: DistributedConfig) -> Any:
    """Shard a model, which may have no memory yet. Raises ConfigError for what its family or the mesh cannot do.

    Tied embeddings are in one FSDP group, the root's: transformers' plan would have them in two, which FSDP refuses.
    """
    if model.all_tied_weights_keys:
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        for name in [n for n, module in model.named_modules() if any(module is end for end in ends)]:
            model._fsdp_plan.pop(name, None)
    with told(run, type(model).__name__):
        _, meshes = initialize_distributed_mesh(wanted)
        bounded(meshes, run.trainer.parallel.collective_timeout_s)
        return type(model).maybe_distribute_model(model, wanted, meshes)


def bounded(meshes: Any, seconds: float) -> None:
    """No collective of transformers' meshes takes longer. They are None when there is one rank."""
    names = ("pp", "dp_replicate", "fsdp", "tp", "efsdp", "ep")
    hangs.bounded([meshes.get_mesh(name).get_group() for name in names] if meshes else [], seconds)


@contextlib.contextmanager
def told(run: config.RunFile, what: str) -> Iterator[None]:
    """What transformers refuses, with the names of our settings."""
    settings = run.trainer.parallel
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"trainer.parallel (ranks {settings.ranks}, experts {settings.experts}, tensor {settings.tensor}) does not fit "
            f"{what}: {' '.join(str(error).split())[:300]}") from error


def fits(model: Any, settings: config.Parallel) -> None:
    """Raises ConfigError for what the family's plans cannot split, before transformers fails in the middle of it."""
    shape = model.config.get_text_config()
    heads = [getattr(shape, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    if settings.tensor > 1 and any(n and n % settings.tensor for n in heads):
        raise ConfigError(
            f"trainer.parallel.tensor = {settings.tensor} does not divide the {heads[0]} attention and {heads[1]} key/value "
            "heads of the model; lower it")
    if settings.experts > 1 and not model.ep_plan:
        raise ConfigError(
            f"trainer.parallel.experts = {settings.experts}, but {type(model).__name__} has no plan for experts; set it to 1")
    if odd := next((int(m.num_experts) for m in experts_of(model) if m.num_experts % settings.experts), None):
        raise ConfigError(
            f"trainer.parallel.experts = {settings.experts} does not divide the {odd} experts of a layer of the model; set "
            "it to a divisor")
    if settings.tensor > 1 and not model.tp_plan:
        raise ConfigError(
            f"trainer.parallel.tensor = {settings.tensor}, but {type(model).__name__} has no plan for tensors; set tensor = 1")
    context.fits(model, settings)


def recompute(model: Any) -> None:
    """Layers keep their inputs alone. transformers does so in training mode only; what is inside them stays in evaluation."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": kept})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def width(settings: config.Parallel) -> int:
    """Ranks of a node."""
    return settings.ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", str(settings.ranks)))


def make(
    run: config.RunFile, model: Any, group: dist.ProcessGroup, experts: int, hidden: int, device: torch.device,
) -> ExpertParallel:
    """The exchange of trainer.parallel.exchange, or the one that the cost model chooses. Collective."""
    settings, shape = run.trainer.parallel, model.config.get_text_config()
    across = width(settings)
    ranks = dist.get_process_group_ranks(group)
    top_k = int(getattr(shape, "num_experts_per_tok", None) or getattr(shape, "moe_topk", None) or 1)
    demand = Demand(
        experts, top_k, hidden, len(ranks), across, run.model.dtype, settings.max_tokens, settings.num_sms, settings.hybrid,
        pad_hidden=settings.pad_hidden, capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        group_ranks=tuple(ranks))
    name = settings.exchange
    if name == "auto":
        name = chosen(demand, settings, device).name
    if name == "deep_ep":
        return DeepEP(group, demand, device)
    if name == "hierarchical":
        nodes = topology(group, across)
        hangs.bounded([nodes.node, nodes.rail], settings.collective_timeout_s)
        return Hierarchical(nodes, experts, canonical=settings.canonical)
    if name == "flat":
        nodes = max(1, len(ranks) // across)
        return Flat(group, experts, nodes=nodes if settings.canonical else 1)
    return (AllGather if name == "all_gather" else Copies)(group, experts)


def chosen(demand: Demand, settings: config.Parallel, device: torch.device) -> cost.Choice:
    """By the cost model; DeepEP takes part where it can be used. The reason is logged."""
    usable = device.type == "cuda" and not problems(demand) and _importable("deep_ep")
    links = INSTANCES.get(settings.instance_type)
    fabric = cost.Fabric(
        demand.ranks, min(demand.ranks, demand.ranks_per_node), settings.fast_gb_s or (links.fast_gb_s if links else 450),
        settings.slow_gb_s or (links.slow_gb_s if links else 50))
    layer = cost.Layer(demand.experts, demand.top_k, demand.hidden)
    among = (*(["deep_ep"] if usable else []), "hierarchical", "flat", "all_gather")
    choice = cost.choose(layer, fabric, settings.max_tokens, among)
    if dist.get_rank() == 0:
        log.info(f"exchange of tokens: {choice.why}")
    return choice


def _importable(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that one kernel may take together: those on the same mesh with the same placements."""
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        key = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        found.setdefault(key, []).append(parameter)
    return list(found.values())


def optimizer(model: nn.Module, settings: config.Trainer, learning_rate: float) -> torch.optim.AdamW:
    """AdamW as for one process (services/trainer/optimizer.py), with a group for each mesh: kernels cannot span them."""
    groups = []
    for matrices in (True, False):
        members = [p for p in model.parameters() if p.requires_grad and (p.ndim >= 2) == matrices]
        decay = settings.weight_decay if matrices else 0.0
        groups += [{"params": part, "weight_decay": decay} for part in by_mesh(members)]
    small = any(p.dtype.itemsize < 4 for p in model.parameters() if p.requires_grad)
    return (MasterAdamW if small else torch.optim.AdamW)(
        groups, lr=learning_rate, betas=settings.betas, eps=settings.eps, foreach=False, fused=False)


def clipped_step(
    optimizer: torch.optim.Optimizer, model: nn.Module, max_norm: float, what: str, loss: float = 0.0,
) -> float:
    """services.trainer.optimizer.clipped_step over all meshes: the norm is that of the whole gradient, each expert once."""
    parts = by_mesh(p for p in model.parameters() if p.grad is not None)
    norms = [whole(get_total_norm([p.grad for p in part if p.grad is not None], foreach=False)) for part in parts]
    norm = math.sqrt(sum(float(n) ** 2 for n in norms))
    if not (norm < float("inf") and math.isfinite(loss)):
        optimizer.zero_grad(set_to_none=True)
        raise NonFinite(f"{what}: the gradient norm is {norm}, the loss {loss}; nothing was applied", "NON_FINITE_GRADIENT")
    for part in parts:
        clip_grads_with_norm_(part, max_norm, torch.tensor(norm, dtype=torch.float64, device=part[0].device), foreach=False)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def reshard(model: nn.Module) -> None:
    """After a pass without gradients, on every rank: FSDP leaves the last layers gathered for a backward pass, and none comes.

    A rank that then looks at its state by itself, as rank 0 does for a checkpoint, would let go of them and gather them again
    in the next pass, while the others do not.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gathered from its mesh. Collective for a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's share."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def laid_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's share of a tensor that every rank holds whole, placed as `like` is."""
    if not isinstance(like, DTensor):
        return tensor.to(like.device)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def empty_like(tensor: torch.Tensor, **different: Any) -> torch.Tensor:
    """Memory for a tensor, or for this rank's share of one, placed as it is; `different`: another dtype, another device."""
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, **different)
    return DTensor.from_local(
        torch.empty_like(tensor.to_local(), **different), tensor.device_mesh, tensor.placements, run_check=False,
        shape=tensor.shape, stride=tensor.stride())


@torch.no_grad()
def place(tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Write this rank's share of a whole tensor into `like`."""
    like.copy_(laid_out(tensor.detach(), like))
