"""The synchronous decoder: continuous batching of any transformers causal language model, one step at a time.

`step()` admits waiting requests (each distinct prompt runs once and is copied to the slots that share it), samples one token
for every active row and returns what finished. Between two steps `load()` may swap the weights.

Two ways to form passes, the only place where they differ is `_prompt_passes` and `_decode_passes`:

* fast: all active rows in one pass, keys read in place up to the longest row;
* deterministic: every pass has a shape that depends on the row alone, `WIDTH` rows wide (padded with a scratch row) and as long
  as the row's own bucket, on dense experts, so a row's arithmetic is the same whoever runs beside it, whenever and in whichever
  slot.

Axes: B rows of a pass, Q its tokens per row, V vocabulary, P prompts of a pass, R rows that receive them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from services.rollout import attention
from services.rollout.engine import Generation, Request
from services.rollout.kv import DecodePass, Masks, PromptPass, SlotCache
from services.rollout.routes import RouteCapture
from services.rollout.rows import Rows, finish_reason
from services.rollout.sampling import sample, uniforms
from slipstream.errors import InvalidInput
from slipstream.manifest import RawTensor
from slipstream.model import cooked, experts_of, load_state
from slipstream.protos.types.v1 import policy_pb2

if TYPE_CHECKING:
    from services.rollout.graph import DecodeGraph
    from slipstream.adapters import Merged

WIDTH = 128  # rows of a deterministic decode pass; at least 8, below which CPU kernels depend on it
PROMPT_TOKENS = 256  # padded tokens of a deterministic prompt pass of short prompts
ROOM = 32  # a row has room for the context, rounded up to a multiple of this
BUCKET = 16  # the fast decode pass reads keys up to the longest row, rounded up to a multiple of this
SMALLEST = 16  # deterministic lengths are powers of two from here on
ADMIT_SHARE = 8  # while rows run, newcomers wait until this share of the slots is free: a prompt pass costs as much as a step
LEAST_ROWS = 2  # of a compiled pass: torch compiles a width of one apart
FAST_PROMPT_TOKENS = 8192  # most padded tokens of a fast prompt pass


class Decoder:
    """Not thread-safe: one thread owns it, together with the model."""

    def __init__(
        self, model: nn.Module, slots: int, context: int, *, deterministic: bool = False, capture_routes: bool = False,
        recompute_on_swap: bool = False, version: policy_pb2.PolicyVersion | None = None, merged: Merged | None = None,
        compiled: str = "none",
    ) -> None:
        """`merged`: the adapter in `model`, if it has one; then versions are of it alone. `compiled`: see rollout.compile."""
        self.model: Any = model.eval()
        self.config = self.model.config.get_text_config()
        self.vocabulary: int = self.config.vocab_size
        self.slots, self.context, self.deterministic = slots, context, deterministic
        self.recompute_on_swap, self.merged = recompute_on_swap, merged
        self.version = version or policy_pb2.PolicyVersion()
        self.loaded: Sequence[RawTensor] = ()  # tensors of `version`, to come back to
        if deterministic:
            self._refuse_batch_dependence()
        else:
            attention.use(model, compiled)
        whole = compiled == "all" and not deterministic
        self.room = _round_up(context + BUCKET if whole else context, ROOM)  # a pass over the whole room would be another graph
        parameter = next(model.parameters())
        self.device = parameter.device
        self.cache = SlotCache(self.config, slots, self.room)
        self.masks = Masks(self.config, self.cache.layer_types, parameter.dtype, self.device, self.room)
        self.capture = RouteCapture(model) if capture_routes else None
        self.graph = self._compiled() if whole else None
        self.rows = Rows(slots, context)
        self.waiting: deque[Request] = deque()
        self.generated_tokens = 0
        self._checked: np.ndarray | None = None  # the last read-only prompt whose tokens were found within the vocabulary
        self._last_B: torch.Tensor | None = None  # during a prompt pass: index of each row's last token
        only_last = weakref.WeakMethod(self._only_last)  # the model may outlive this decoder
        self.model.get_output_embeddings().register_forward_pre_hook(
            lambda m, args: None if torch.compiler.is_compiling() else (f := only_last()) and f(m, args))

    @property
    def active(self) -> int:
        return self.rows.active

    def submit(self, request: Request) -> None:
        """Queue a request. Raises InvalidInput naming the field."""
        self.check(request)
        self.waiting.append(request)

    def check(self, request: Request) -> None:
        """Raises InvalidInput, naming the field, for a request that can never run. Safe from any thread."""
        size = len(request.prompt)
        if not size:
            raise InvalidInput("prompt is empty; at least one token is needed", "EMPTY_PROMPT", field="prompt")
        if size >= self.context:
            raise InvalidInput(
                f"prompt has {size} tokens; the context of {self.context} leaves room for at most {self.context - 1}: "
                "shorten it or raise rollout.context", "PROMPT_TOO_LONG", field="prompt", value=size)
        if not request.temperature > 0:
            raise InvalidInput(
                f"temperature = {request.temperature} is not above 0; use greedy for the most probable token",
                "TEMPERATURE", field="temperature", value=request.temperature)
        if request.max_new_tokens < 1:
            raise InvalidInput(
                f"max_new_tokens = {request.max_new_tokens} is not at least 1", "MAX_NEW_TOKENS", field="max_new_tokens")
        if request.routes and self.capture is None:
            raise InvalidInput("routes are not captured here; set rollout.capture_routes = true", "ROUTES", field="routes")
        if request.prompt is self._checked:  # as the one before: the requests of a group share their prompt
            return
        if not 0 <= request.prompt.min() <= request.prompt.max() < self.vocabulary:
            raise InvalidInput(f"prompt has a token outside of 0..{self.vocabulary - 1}", "TOKEN", field="prompt")
        self._checked = None if request.prompt.flags.writeable else request.prompt

    @torch.inference_mode()
    def abort(self, requests: Iterable[int]) -> list[tuple[Request, Generation]]:
        """End requests by id, unknown ones ignored; what each had generated, finish reason ABORT."""
        ids = set(requests)
        queued = [r for r in self.waiting if r.id in ids]
        self.waiting = deque(r for r in self.waiting if r.id not in ids)
        nothing = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), (), finish_reason(False, aborted=True))
        rows = np.array([i for i, r in enumerate(self.rows.requests) if r.id in ids], np.int64)
        return [(r, nothing) for r in queued] + self._leave(rows, np.zeros(len(rows), bool), aborted=True)

    def progress(self, request: Request, start: int) -> Generation | None:
        """What an active request has generated from its `start`-th token on."""
        row = next((i for i, r in enumerate(self.rows.requests) if r is request), None)
        return None if row is None else self.rows.generation(row, 0, start)

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, Generation]]:
        """Admit what fits, sample one token per active row, return the requests that ended."""
        ended = []
        if self.waiting and self.active < self.slots:
            new = self._admit()
            if len(new):
                self._prompt(new, self.rows.length[new])
                ended = self._leave(*self.rows.finished())
        if self.active:
            for step, rows in self._decode_passes():
                self._decode(step, rows)
            ended += self._leave(*self.rows.finished())
        return ended

    def decode(self, requests: Sequence[Request]) -> list[Generation]:
        """Run requests to the end; results in their order. What else is in flight moves on beside them."""
        wanted = {request.id for request in requests}
        for request in requests:
            self.submit(request)
        done: dict[int, Generation] = {}
        while len(done) < len(requests):
            done.update((request.id, generation) for request, generation in self.step() if request.id in wanted)
        return [done[request.id] for request in requests]

    @torch.inference_mode()
    def load(
        self, tensors: Sequence[RawTensor], version: policy_pb2.PolicyVersion, prove: Callable[[], None] = lambda: None,
    ) -> None:
        """Swap the weights in place; requests in flight go on. Raises InvalidInput, nothing changed, if they do not fit.

        `prove` looks at what was loaded, before any token is sampled with it; what it raises brings the former weights back.
        """
        verify(self.merged.adapter if self.merged else self.model, tensors)
        self._put(tensors)
        try:
            prove()
        except InvalidInput:
            self._put(self.loaded)
            raise
        self.loaded = tensors
        self.version = version
        self.rows.note_version(version)
        if self.recompute_on_swap:
            self.recompute()

    @torch.inference_mode()
    def recompute(self) -> None:
        """Compute keys and values of the rows in flight anew, by the weights of now."""
        if self.active:
            self._prompt(np.arange(self.active), self.rows.length[: self.active] - 1, draw=False)

    def _put(self, tensors: Sequence[RawTensor]) -> None:
        if self.merged:
            self.merged.load(tensors)
        else:
            load_state(self.model, tensors)

    def _compiled(self) -> DecodeGraph:
        from services.rollout.graph import DecodeGraph  # importing the compiler takes a second

        return DecodeGraph(self.model, self.cache, self.masks)

    def _refuse_batch_dependence(self) -> None:
        kind = (getattr(self.config, "rope_parameters", None) or {}).get("rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise InvalidInput(
                f"{type(self.model).__name__}: rope type {kind} depends on the longest sequence of a batch; set "
                "schedule.deterministic = false", "DETERMINISTIC")
        if experts_of(self.model) and self.config._experts_implementation != "dense":
            raise InvalidInput(
                f"experts implementation {self.config._experts_implementation!r} depends on batch mates; build the model with "
                "experts = 'dense' for deterministic decoding", "DETERMINISTIC")

    def _admit(self) -> np.ndarray:
        count = min(len(self.waiting), self.slots - self.active)
        if self.active and count < min(len(self.waiting), self.slots // ADMIT_SHARE):
            return np.zeros(0, np.int64)
        return self.rows.add([self.waiting.popleft() for _ in range(count)], self.version)

    def _leave(self, rows: np.ndarray, stopped: np.ndarray, aborted: bool = False) -> list[tuple[Request, Generation]]:
        if not len(rows):
            return []
        ended = [
            (self.rows.requests[row], self.rows.generation(row, finish_reason(stop, aborted)))
            for row, stop in zip(rows.tolist(), stopped.tolist(), strict=True)]
        source, target = self.rows.remove(rows)
        if len(source):
            length = int(self.rows.length[target].max())
            self.cache.move(self._tensor(source), self._tensor(target), length)
        return ended

    # prompt passes

    def _prompt(self, rows: np.ndarray, lengths: np.ndarray, draw: bool = True) -> None:
        """Fill the cache with the first `lengths` tokens of `rows`; with `draw`, sample the token that follows.

        Without it (a recomputed cache) the routes of the first time stay: the log-probabilities come from them.
        """
        prompts: dict[bytes, int] = {}
        of_row = [
            prompts.setdefault(self.rows.tokens[row, :length].tobytes(), i)
            for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True))]
        owners = np.array(list(prompts.values()))
        order = owners[np.argsort(lengths[owners], kind="stable")]
        members: dict[int, list[int]] = {}
        for i, owner in enumerate(of_row):
            members.setdefault(owner, []).append(i)
        for chunk, width, size in self._prompt_passes(order, lengths):
            receivers = np.array([i for owner in chunk for i in members[owner]])
            source = np.repeat(np.arange(len(chunk)), [len(members[owner]) for owner in chunk])
            self._prompt_pass(rows[chunk], lengths[chunk], width, size, rows[receivers], source, draw)

    def _prompt_passes(self, order: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[np.ndarray, int, int]]:
        """(prompts, rows of the pass, tokens of a row) for prompts in order of length. Prompts of 0 tokens need no pass."""
        order = order[lengths[order] > 0]
        while len(order):
            if self.deterministic:
                size = int(self._buckets(lengths[order[:1]])[0])
                width = max(1, PROMPT_TOKENS // size)
                count = min(width, int(np.count_nonzero(lengths[order] <= size)))
            else:
                totals = lengths[order] * np.arange(1, len(order) + 1)
                count = width = max(1, int(np.searchsorted(totals, FAST_PROMPT_TOKENS, "right")))
                size = int(lengths[order[count - 1]])
            yield order[:count], width, size
            order = order[count:]

    def _prompt_pass(
        self, owners: np.ndarray, lengths: np.ndarray, width: int, size: int, receivers: np.ndarray, source: np.ndarray,
        draw: bool,
    ) -> None:
        ids = np.zeros((width, size), np.int64)
        last = np.zeros(width, np.int64)
        take = min(size, self.context)
        ids[: len(owners), :take] = self.rows.tokens[owners, :take]
        ids *= np.arange(size) < np.pad(lengths, (0, width - len(owners)))[:, None]
        last[: len(owners)] = lengths - 1
        positions_1_Q = torch.arange(size, device=self.device)[None]
        self.cache.begin(PromptPass(self._tensor(receivers), self._tensor(source)))
        self._last_B = self._tensor(last)
        logits_P_V = self._forward(ids, positions_1_Q, self.masks.of(positions_1_Q, size), draw)
        self._last_B = None
        if draw:
            self._note_routes(receivers, source, width, take)
            self._draw(logits_P_V, receivers, source)

    def _only_last(self, _module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Before the language-model head: keep the hidden state of each prompt's last token, [B, Q, H] -> [B, 1, H]."""
        if self._last_B is None:
            return None
        hidden = args[0]
        return (hidden[torch.arange(hidden.shape[0], device=hidden.device), self._last_B][:, None], *args[1:])

    # decode passes

    def _decode_passes(self) -> Iterator[tuple[DecodePass, np.ndarray]]:
        """(pass, rows): all rows at once, or chunks of one bucket padded to WIDTH with the scratch slot."""
        active = self.active
        if not active:
            return
        length = self.rows.length[:active]
        if not self.deterministic:
            slots = np.arange(max(active, LEAST_ROWS) if self.graph else active)  # a row beyond `active` is nobody's
            positions = np.zeros(len(slots), np.int64)
            positions[:active] = length - 1
            read = _round_up(int(length.max()), BUCKET)
            yield DecodePass(self._tensor(slots), self._tensor(positions), read, True), slots[:active]
            return
        buckets = self._buckets(length)
        for bucket in np.unique(buckets).tolist():
            members = np.flatnonzero(buckets == bucket)
            for start in range(0, len(members), WIDTH):
                rows = members[start : start + WIDTH]
                slots = np.full(WIDTH, self.slots)
                slots[: len(rows)] = rows
                positions = np.zeros(WIDTH, np.int64)
                positions[: len(rows)] = length[rows] - 1
                yield DecodePass(self._tensor(slots), self._tensor(positions), bucket, False), rows

    def _decode(self, step: DecodePass, rows: np.ndarray) -> None:
        last = self.rows.length[rows] - 1
        ids = np.zeros((len(step.positions_B), 1), np.int64)
        ids[: len(rows), 0] = self.rows.tokens[rows, last]
        if self.graph is not None:
            with self.capture or contextlib.nullcontext():
                logits_B_V = self.graph(self._tensor(ids), step)
        else:
            positions_B_1 = step.positions_B[:, None]
            self.cache.begin(step)
            logits_B_V = self._forward(ids, positions_B_1, self.masks.of(positions_B_1, step.length))
        if self.capture is not None:
            routes = self.capture.take().cpu().numpy()
            self._routes_like(routes)[rows, last] = routes[: len(rows)]
        self._draw(logits_B_V, rows, np.arange(len(rows)))

    def _forward(self, ids: np.ndarray, positions_B_Q: torch.Tensor, mask: Any, capture: bool = True) -> torch.Tensor:
        """Logits [B, V] of the last (or only) token of each row."""
        with self.capture if self.capture is not None and capture else contextlib.nullcontext():
            output = self.model(
                input_ids=self._tensor(ids), position_ids=positions_B_Q, attention_mask=mask, cache=self.cache, use_cache=True)
        return output.logits[:, -1]

    def _draw(self, logits_B_V: torch.Tensor, rows: np.ndarray, source: np.ndarray) -> None:
        """Sample for `rows`, whose distributions are `logits_B_V[source]`."""
        state = self.rows
        if len(source) != len(logits_B_V) or not np.array_equal(source, np.arange(len(source))):
            logits_B_V = logits_B_V[self._tensor(source)]
        uniform = uniforms(state.seed[rows], state.offset[rows] + state.length[rows])
        temperature, greedy = state.temperature[rows], state.greedy[rows]
        tokens, logprobs = sample(
            logits_B_V, self._tensor(uniform),
            self._tensor(temperature) if (temperature != 1).any() else None,
            self._tensor(greedy) if greedy.any() else None)
        state.append(rows, tokens.cpu().numpy(), logprobs.cpu().numpy())
        self.generated_tokens += len(rows)

    # routes

    def _note_routes(self, receivers: np.ndarray, source: np.ndarray, width: int, size: int) -> None:
        if self.capture is None:
            return
        routes = self.capture.take().cpu().numpy()
        routes = routes.reshape(width, -1, *routes.shape[1:])
        self._routes_like(routes[0])[receivers, :size] = routes[source, :size]

    def _routes_like(self, routes: np.ndarray) -> np.ndarray:
        if self.rows.routes is None:
            dtype = np.uint8 if routes.dtype == np.uint8 else np.uint16
            self.rows.routes = np.zeros((self.slots, self.context, *routes.shape[1:]), dtype)
        return self.rows.routes

    def _buckets(self, lengths: np.ndarray) -> np.ndarray:
        """The length of the deterministic pass that serves a sequence of this length."""
        powers = 2 ** np.ceil(np.log2(np.maximum(lengths, SMALLEST))).astype(np.int64)
        return np.minimum(powers, self.room)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def verify(model: Any, tensors: Iterable[RawTensor]) -> None:
    """Raises InvalidInput when a tensor's bytes, shape or dtype are not those of the model's tensor of that name."""
    own = model.state_dict()
    for tensor in tensors:
        try:
            dtype = cooked(tensor).dtype
        except (RuntimeError, ValueError) as error:
            raise InvalidInput(
                f"tensor {tensor.name}: {len(tensor.data)} bytes are not {tensor.dtype} {tuple(tensor.shape)}", "SHAPE",
            ) from error
        if tensor.name in own and dtype != own[tensor.name].dtype:
            raise InvalidInput(f"tensor {tensor.name}: {tensor.dtype} is not the model's {own[tensor.name].dtype}", "DTYPE")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
