"""Router replay: the trainer's forward pass sends each token to the experts that were chosen for it before.

Which experts a token takes is a jump: rounding alone flips it, and then trainer and sampler are different functions. So the
indices that the sampler recorded are replayed (R3, arXiv 2510.11370), or those of an earlier pass of the trainer itself (R2,
arXiv 2507.18071, section 5.3). Only the indices: weights are gathered from the live router's scores and
normalised by the family's own code, so the router keeps its gradient.

No list of families. Every MoE block that transformers runs through its experts interface ends in
`experts(hidden, indices, weights)`, and the indices come from a `topk` over the experts' scores, in the router or in the block
around it. One forward pass finds that call for each layer; a second one, with other indices, proves that they reach the experts
and that no weight is lost. A model where this does not hold is refused by name.

    topk(scores, K) ─► live indices ─┬─ same set as recorded, or nothing recorded ─► live indices        ─► values of `scores`
                                     └─ another set: a flip, counted              ─► recorded indices    ─► gathered there

An equal set is taken in the live order, so a replay of the model's own choice is the forward pass itself, bit for bit, whatever
the order within a recorded set.

Routers that first choose groups and then hand on scores that are zero outside of them (deepseek_v2) would give a recorded
expert of another group the weight 0: there the groups are replayed, too.

Axes: R rows, T positions of a row, N = R x T, L MoE layers in the order of their calls, K experts per token, E experts of a
layer, G groups of experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from services.trainer.expert_load import number_of
from slipstream.errors import ConfigError, InvalidInput
from slipstream.model import experts_of

PROBE = (2, 8)  # rows and tokens of the passes that find and prove
LOST_WEIGHTS = 0.1  # share of weights that are 0 under indices of another group: more means that they were masked


@dataclass(slots=True)
class _Seam:
    """Where one layer chooses: the `ordinal`-th topk in a forward pass of `module`; None where a table says it all."""

    module: nn.Module | None
    ordinal: int
    experts: int
    top_k: int
    groups: int = 0  # G of a topk over groups in the same pass
    force_groups: bool = False


@dataclass(slots=True)
class _TopK:
    """One topk that was seen."""

    module: nn.Module
    ordinal: int
    scores: torch.Size
    indices: torch.Tensor


class RouteReplay:
    """Replays recorded routes in one model. Takes two small forward passes when made.

    Raises ConfigError, naming the model's class, when its routes cannot be replayed.
    """

    def __init__(self, model: Any) -> None:
        self._name = type(model).__name__
        self._experts = experts_of(model)
        if not self._experts:
            raise self._refusal("has no experts that transformers' experts interface can see")
        self._recorded_L_N_K: torch.Tensor | None = None
        self._routed_N: torch.Tensor
        self._counts = [torch.zeros((), dtype=torch.int64)] * 3
        with torch.no_grad(), _evaluating(model):
            seams, chosen = _find(model, self._experts, self._refusal)
            self._seams = seams
            self.layers, self.top_k, self.experts = len(seams), seams[0].top_k, min(s.experts for s in seams)
            self.chosen = all(seam.module is not None for seam in seams)  # and none by a table, which is not replayed
            if any(seam.top_k != self.top_k for seam in seams):
                raise self._refusal("takes another number of experts in some layers")
            for layer, seam in enumerate(seams):
                if seam.module is not None:
                    _Replaced(self, layer, seam)
            self._prove(model, chosen)

    def check(self, routes: np.ndarray) -> None:
        """Raises InvalidInput when [..., L, K] recorded indices are not of this model."""
        if routes.shape[-2:] != (self.layers, self.top_k):
            raise InvalidInput(
                f"routes are of {routes.shape[-2]} layers with {routes.shape[-1]} experts each, the model has {self.layers} "
                f"with {self.top_k}: the sampler ran another model; set algorithm.route_replay = none to train without them",
                "ROUTES_SHAPE", field="routes")
        if routes.size and (most := int(routes.max())) >= self.experts:
            raise InvalidInput(
                f"routes name expert {most}; the model has 0..{self.experts - 1}", "ROUTES_EXPERT", field="routes")

    @contextlib.contextmanager
    def using(self, routes: np.ndarray, routed: np.ndarray) -> Iterator[None]:
        """Forward passes inside take `routes` [R, T, L, K] where `routed` [R, T] and choose for themselves elsewhere.

        Raises InvalidInput as `check`, and at the end for a token that has an expert twice.
        """
        self.check(routes)
        device = next(self._experts[0].parameters()).device
        recorded = torch.from_numpy(routes.astype(np.int64)).to(device)
        self._recorded_L_N_K = recorded.reshape(-1, self.layers, self.top_k).transpose(0, 1)
        self._routed_N = torch.from_numpy(routed.reshape(-1)).to(device)
        self._counts = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(3)]
        try:
            yield
        finally:
            self._recorded_L_N_K = None
        if int(self._counts[2]):
            raise InvalidInput(
                f"{int(self._counts[2])} recorded routes name an expert twice for one token", "ROUTES_EXPERT", field="routes")

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """The experts that layers are given in the one forward pass inside: L tensors [R x T, K], in the order of calls."""
        got: list[tuple[torch.Tensor, torch.Tensor]] = []
        indices: list[torch.Tensor] = []
        handles = [m.register_forward_pre_hook(_listen(got), with_kwargs=True) for m in self._experts]
        try:
            yield indices
        finally:
            for handle in handles:
                handle.remove()
        indices += [chosen.reshape(-1, self.top_k) for chosen, _ in got]

    def flips(self) -> tuple[int, int]:
        """(token, layer) pairs whose live set differed from the recorded one, and all compared, of the last `using`."""
        return int(self._counts[0]), int(self._counts[1])

    def replaced(self, layer: int, scores: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        """Indices for a layer in place of the `live` ones, in their shape; counts flips."""
        assert self._recorded_L_N_K is not None
        recorded_N_K, live_N_K = self._recorded_L_N_K[layer], live.reshape(-1, live.shape[-1])
        if len(recorded_N_K) != len(live_N_K):
            raise InvalidInput(
                f"layer {layer} chose experts for {len(live_N_K)} tokens, routes are of {len(recorded_N_K)}", "ROUTES_SHAPE")
        sorted_N_K = recorded_N_K.sort(-1).values
        same_N = (live_N_K.sort(-1).values == sorted_N_K).all(-1)
        flipped_N = self._routed_N & ~same_N
        twice_N = self._routed_N & (sorted_N_K[:, 1:] == sorted_N_K[:, :-1]).any(-1)
        for count, found_N in zip(self._counts, (flipped_N, self._routed_N, twice_N), strict=True):
            count += found_N.sum()
        return torch.where(flipped_N[:, None], recorded_N_K, live_N_K).reshape(live.shape)

    def forced_groups(self, layer: int, groups_N_G: torch.Tensor, k: int, experts: int) -> torch.Tensor:
        """The k best groups, those of recorded experts before all others: [N, k]."""
        assert self._recorded_L_N_K is not None
        size = experts // groups_N_G.shape[-1]
        held_N_G = torch.zeros_like(groups_N_G, dtype=torch.bool).scatter(1, self._recorded_L_N_K[layer] // size, True)
        return groups_N_G.masked_fill(held_N_G & self._routed_N[:, None], torch.inf).topk(k, -1).indices

    @property
    def on(self) -> bool:
        """Whether a forward pass now is one with recorded routes."""
        return self._recorded_L_N_K is not None

    def _prove(self, model: Any, chosen: list[torch.Tensor]) -> None:
        """Other indices than the model's own must reach the experts, and with weights that are not zero."""
        for attempt in range(2):
            foreign = [
                (own + (s.experts // s.groups if s.groups else 1) * (s.module is not None)) % s.experts
                for s, own in zip(self._seams, chosen, strict=True)]
            got: list[tuple[torch.Tensor, torch.Tensor]] = []
            handles = [m.register_forward_pre_hook(_listen(got), with_kwargs=True) for m in self._experts]
            try:
                with self.using(torch.stack(foreign, 1).cpu().numpy().reshape(*PROBE, self.layers, -1), np.ones(PROBE, bool)):
                    _probe(model)
            finally:
                for handle in handles:
                    handle.remove()
            lost = []
            for layer, (expected, (indices, weights)) in enumerate(zip(foreign, got, strict=True)):
                if not torch.equal(indices.sort(-1).values, expected.sort(-1).values):
                    raise self._refusal(f"does not take replayed experts in MoE layer {layer}")
                if not bool(torch.isfinite(weights).all()) or float((weights == 0).float().mean()) > LOST_WEIGHTS:
                    lost.append(layer)
            if not lost:
                return
            if attempt or not all(self._seams[layer].groups for layer in lost):
                raise self._refusal(f"gives replayed experts no weight in MoE layer {lost[0]}")
            for layer in lost:
                self._seams[layer].force_groups = True

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self._name} {why}: its routes cannot be replayed; set algorithm.route_replay = none and, without replay, "
            "consider algorithm.preset = gspo-moe")


class _Replaced(TorchFunctionMode):
    """Changes the topk of one layer while its router runs inside `RouteReplay.using`."""

    def __init__(self, replay: RouteReplay, layer: int, seam: _Seam) -> None:
        super().__init__()
        assert seam.module is not None
        self._replay, self._layer, self._seam, self._seen, self._entered = replay, layer, seam, 0, False
        self._live_N_G: torch.Tensor | None = None
        seam.module.register_forward_pre_hook(self._before)
        # Before the hooks that are there: what was entered last is left first.
        seam.module.register_forward_hook(self._after, always_call=True, prepend=True)

    def _before(self, *_: object) -> None:
        self._seen, self._entered, self._live_N_G = 0, self._replay.on, None
        if self._entered:
            self.__enter__()

    def _after(self, *_: object) -> None:
        if self._entered:
            self._entered = False
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        scores, ordinal, seam = _scores(args, kwargs), self._seen, self._seam
        self._seen += 1
        if ordinal == seam.ordinal:
            indices = self._replay.replaced(self._layer, scores, self._live(scores, found.indices))
        elif ordinal < seam.ordinal and seam.force_groups and _is_group(scores, seam.experts):
            self._live_N_G = torch.zeros_like(scores, dtype=torch.bool).scatter(1, found.indices, True)
            indices = self._replay.forced_groups(self._layer, scores, found.indices.shape[-1], seam.experts)
        else:
            return found
        return torch.return_types.topk((scores.gather(-1, indices), indices))  # pyright: ignore

    def _live(self, scores: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """The router's own choice: where groups were forced, the one within its own groups."""
        if self._live_N_G is None:
            return indices
        of_expert = self._live_N_G.repeat_interleave(self._seam.experts // self._live_N_G.shape[-1], -1)
        return scores.detach().masked_fill(~of_expert, -torch.inf).topk(indices.shape[-1], -1, sorted=False).indices


class _Seen(TorchFunctionMode):
    """Hands every topk to `tell`."""

    def __init__(self, tell: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            self._tell(_scores(args, kwargs), found.indices)
        return found


def _find(
    model: Any, experts: list[nn.Module], refusal: Callable[[str], ConfigError],
) -> tuple[list[_Seam], list[torch.Tensor]]:
    """Each layer's seam, in the order of calls, and what it chose for the probe, [N, K] each."""
    running: list[tuple[nn.Module, list[int]]] = []  # modules whose forward runs now, and how many topk each has done
    seen: list[_TopK] = []
    called: list[nn.Module] = []
    seams: list[_Seam] = []
    chosen: list[torch.Tensor] = []

    def note(scores: torch.Tensor, indices: torch.Tensor) -> None:
        if running:
            module, count = running[-1]
            seen.append(_TopK(module, count[0], scores.shape, indices))
            count[0] += 1

    def choice(module: nn.Module, args: Any, kwargs: Any) -> None:
        indices = args[1] if len(args) > 1 else kwargs["top_k_index"]
        if module in called:
            raise refusal("runs the same experts twice in one pass")
        seams.append(_seam(model, module, indices, seen, refusal))
        called.append(module)
        chosen.append(indices)
        seen.clear()

    handles = [m.register_forward_pre_hook(choice, with_kwargs=True) for m in experts]
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda m, _: running.append((m, [0]))))
        handles.append(module.register_forward_hook(lambda *_: running.pop() and None if running else None, always_call=True))
    try:
        with _Seen(note):
            _probe(model)
    finally:
        for handle in handles:
            handle.remove()
    if len(seams) != len(experts):
        raise refusal(f"ran {len(seams)} of its {len(experts)} MoE layers for a plain text")
    return seams, chosen


def _seam(
    model: Any, experts: nn.Module, indices: torch.Tensor, seen: list[_TopK], refusal: Callable[[str], ConfigError],
) -> _Seam:
    """The topk whose result these experts were given."""
    count, top_k = number_of(experts), indices.shape[-1]
    for call in reversed(seen):
        if call.indices.numel() == indices.numel() and torch.equal(call.indices.reshape(indices.shape), indices):
            if call.scores[-1] != count:
                raise refusal(f"chooses among {call.scores[-1]} for {count} experts")
            groups = [c for c in seen if c.module is call.module and c.ordinal < call.ordinal and len(c.scores) == 2]
            return _Seam(call.module, call.ordinal, count, top_k, groups[-1].scores[-1] if groups else 0)
    name = next(n for n, m in model.named_modules() if m is experts)
    block = model.get_submodule(name.rpartition(".")[0])
    if any(b.ndim == 2 and b.shape[-1] == top_k and not b.is_floating_point() for b in block.buffers()):
        return _Seam(None, 0, count, top_k)  # a table from token to experts: the same for sampler and trainer
    raise refusal(f"chooses the experts of {name} by no topk that could be replayed")


def _is_group(scores: torch.Tensor, experts: int) -> bool:
    return scores.ndim == 2 and scores.shape[-1] < experts and experts % scores.shape[-1] == 0


def _scores(args: Any, kwargs: Any) -> torch.Tensor:
    return args[0] if args else kwargs["input"]


def _listen(got: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., None]:
    def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
        got.append((args[1] if len(args) > 1 else kwargs["top_k_index"], args[2] if len(args) > 2 else kwargs["top_k_weights"]))

    return hook


def _probe(model: Any) -> None:
    rows, tokens = PROBE
    ids = torch.arange(rows * tokens, device=model.device).reshape(PROBE) % model.config.get_text_config().vocab_size
    model(input_ids=ids, use_cache=False)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and router jitter for the moment."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
