"""The model of a run as this rank's part of it: no host ever holds the whole.

    shape, without memory (meta device) ──► transformers' plans: FSDP2 × EP × TP, still without ──► this rank's shards filled
        from a directory    transformers reads the byte ranges that the shards are made of
        from a seed         every number that one process would draw, drawn in its order; this rank keeps its own

A rank needs its shards and, while they are filled, one module of the model (a seed) or what transformers has read ahead (a
directory). Two kinds every rank still builds whole: a GGUF file, which is no format of parts, and a directory with tied
embeddings, which transformers ties too late for FSDP.

A seed gives the bits of one process. Constructors and `_init_weights` draw from one generator, submodels in between, so a first
pass draws everything into memory that is dropped, and notes the generator's state before each module; the second draws each
module again and keeps this rank's part. It relies on what transformers tests for all its models: `_init_weights` leaves nothing
of a module's tensors to the constructor.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, PreTrainedModel, initialization
from transformers.distributed.configuration_utils import DistributedConfig

from services.trainer.parallel import mesh
from services.trainer.parallel.experts import Exchanges
from slipstream import config
from slipstream.errors import ConfigError
from slipstream.model import UNREADABLE, build, drawing, from_outline, outline, unreadable
from slipstream.router_precision import compute_in_float32

States = dict[nn.Module, torch.Tensor]  # of torch's generator, before a module was initialised


Prepare = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Built:
    """A model spread over the ranks, in evaluation mode."""

    model: Any
    tokenizer: Any
    exchanges: Exchanges


def spread(
    run: config.RunFile, settings: config.Model, device: torch.device, prepare: Prepare = lambda model, _: model,
) -> Built:
    """The model of `settings` on the ranks of `run`. Collective: `mesh.join` comes first, and `mesh.met` after it.

    `prepare` gets model and tokenizer of the whole, maybe without memory, and returns what of the model is wanted: it, or a
    submodel. Raises ConfigError for a model that cannot be built, or does not fit the mesh.
    """
    if settings.gguf_file:
        return _whole(run, settings, device, prepare)
    shape, tokenizer = outline(settings)
    if settings.build is None and shape.get_text_config().tie_word_embeddings:
        return _whole(run, settings, device, prepare)
    dtype = getattr(torch, settings.dtype)
    kernel = "grouped_mm" if settings.experts == "auto" else settings.experts
    with torch.device("meta"):
        empty = from_outline(copy.deepcopy(shape), dtype, kernel).eval()
    if settings.path and (Path(settings.path) / "generation_config.json").is_file():
        empty.generation_config = GenerationConfig.from_pretrained(settings.path)
    part = prepare(empty, tokenizer)
    path = next(name for name, module in empty.named_modules() if module is part)
    wanted, exchanges = mesh.plan(part, run, device)
    if settings.build is None:
        model = _loaded(type(part), settings, run, wanted, dtype, kernel)
    else:
        states: States = {}
        with drawing(run.run.seed), torch.device("meta"), _Drawn(), _noting(states):
            whole = from_outline(copy.deepcopy(shape), dtype, kernel)
        model = mesh.apply(part, run, wanted)
        _allocate(model, device)
        _fill(model, whole, f"{path}." if path else "", states, dtype)
    compute_in_float32(model.eval())
    if run.trainer.parallel.recompute:
        mesh.recompute(model)
    return Built(model, tokenizer, exchanges)


def _whole(run: config.RunFile, settings: config.Model, device: torch.device, prepare: Prepare) -> Built:
    """Built by every rank before it keeps its part: host memory must hold the model once for each."""
    model, tokenizer = build(settings, run.run.seed)
    model, exchanges = mesh.distribute(prepare(model.eval(), tokenizer), run, device)
    return Built(model, tokenizer, exchanges)


def _loaded(
    kind: Any, settings: config.Model, run: config.RunFile, wanted: DistributedConfig, dtype: torch.dtype, kernel: str,
) -> Any:
    """Filled from a directory."""
    try:
        with mesh.told(run, settings.path):
            model: Any = kind.from_pretrained(settings.path, dtype=dtype, distributed_config=wanted)
            mesh.bounded(model._mesh_manager, run.trainer.parallel.collective_timeout_s)
    except UNREADABLE as error:
        raise unreadable(settings, error) from error
    if model._can_set_experts_implementation():
        model.set_experts_implementation(kernel)
    return model


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Memory for this rank's shards and for the buffers. Tied tensors stay one."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # with the old one: its id must not be used again
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                memory = mesh.empty_like(parameter, device=device)
                made[id(parameter)] = parameter, nn.Parameter(memory, parameter.requires_grad)
            setattr(module, name, made[id(parameter)][1])
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)


@torch.no_grad()
def _fill(model: nn.Module, whole: Any, prefix: str, states: States, dtype: torch.dtype) -> None:
    """Draw each module of `whole`, which stays without memory, and keep this rank's part. `prefix`: where `model` is in it."""
    before, tied = torch.get_rng_state(), set(whole.all_tied_weights_keys)
    names = {id(tensor): name for name, tensor in whole.named_parameters() if name not in tied}

    def keep(name: str, tensor: torch.Tensor) -> None:
        if name.startswith(prefix) and name not in tied:
            path, _, last = name.removeprefix(prefix).rpartition(".")
            mesh.place(tensor, getattr(model.get_submodule(path), last))

    torch.set_default_dtype(dtype)
    try:
        for path, owner, module in _order(whole):
            with _real(module), _Drawn(names) as drawn:
                torch.set_rng_state(states[module])
                _initialised(owner, module)
                for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                    keep(f"{path}.{name}".lstrip("."), tensor)
            for number, tensor in drawn.others.items():
                keep(names[number], tensor)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_rng_state(before)


def _order(model: Any, path: str = "", owner: Any = None) -> Iterator[tuple[str, Any, nn.Module]]:
    """(Path, the submodel whose `_init_weights` it is, module), in the order of transformers' `initialize_weights`."""
    owner = model if owner is None or isinstance(model, PreTrainedModel) else owner
    for name, child in model.named_children():
        yield from _order(child, f"{path}.{name}".lstrip("."), owner)
    yield path, owner, model


@torch.no_grad()
@initialization.guard_torch_init_functions()
def _initialised(owner: Any, module: nn.Module) -> None:
    owner._init_weights(module)


@contextlib.contextmanager
def _real(module: nn.Module) -> Iterator[None]:
    """Memory for what is the module's own, its children's not; afterwards there is none again."""
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    kinds: list[tuple[Any, Any]] = [(module._parameters, parameters), (module._buffers, buffers)]
    with torch.device("cpu"):
        for kind, tensors in kinds:
            for name, tensor in tensors.items():
                if tensor is not None:
                    memory = torch.empty_like(tensor, device="cpu")
                    kind[name] = nn.Parameter(memory, tensor.requires_grad) if kind is module._parameters else memory
        try:
            yield
        finally:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


@contextlib.contextmanager
def _noting(states: States) -> Iterator[None]:
    """Models that are made without memory are initialised all the same, for what that draws; `states` has where each began."""
    def init_weights(model: Any) -> None:
        for _, owner, module in _order(model):
            if module not in states:
                states[module] = torch.get_rng_state()
                with _real(module):
                    _initialised(owner, module)
        model.tie_weights(recompute_mapping=False)

    kind: Any = PreTrainedModel
    ordinary = kind.init_weights
    kind.init_weights = init_weights  # as transformers.initialization.no_init_weights does
    try:
        yield
    finally:
        kind.init_weights = ordinary


class _Drawn(TorchDispatchMode):
    """Random numbers for a tensor without memory are drawn and dropped, so that the generator goes on as if it had some.

    With `names`, by identity, they are kept in `others`, as all that is written to such a tensor: it belongs to another module
    than the one that is filled (a block that initialises the router inside it).
    """

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        super().__init__()
        self._names, self.others = names, dict[int, torch.Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        if not (drawn or func._schema.is_mutable) or not (
                any(_empty(a) for a in args) or str(kwargs.get("device")) == "meta"):
            return func(*args, **kwargs)
        if self._names is not None and func._schema.is_mutable:
            if id(args[0]) not in self._names:
                raise ConfigError(
                    "model.build: this family initialises a part of another module's tensor, which cannot be done shard by "
                    "shard; build it once with trainer.parallel.ranks = 1, and give its directory as model.path")
            real = self.others.setdefault(id(args[0]), torch.empty_like(args[0], device="cpu"))
            func(real, *args[1:], **kwargs)
            return args[0]
        if drawn:
            twins = [torch.empty_like(a, device="cpu") if _empty(a) else a for a in args]
            func(*twins, **(kwargs | {"device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs))
        return func(*args, **kwargs)


def _empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta
