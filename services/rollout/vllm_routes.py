"""Which experts vLLM's routers chose, on a CPU, where vLLM's own return of them needs a GPU.

A capturer listens at every router of the model and, after each step, files the rows by request and position. Tokens that the
prefix cache spares have no rows of their own: every computed row is also filed by its cache slot, and a request that begins
behind cached blocks takes theirs.

A request that is computed again (preempted, or after a swap) keeps the rows of the first time: its log-probabilities come from
them. Guessed tokens have rows before they are judged: the next step says how many were accepted, and the rows of the others go.

Axes: T tokens of a step, P positions of a request, S cache slots, L MoE layers, K experts per token.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import numpy as np
import torch


class Rows:
    """Routes by request and position, without vLLM: pure bookkeeping."""

    def __init__(self, slots: int, layers: int, experts_per_token: int, dtype: type = np.uint8) -> None:
        self._by_slot_S_L_K = np.zeros((slots, layers, experts_per_token), dtype)
        self._by_request: dict[str, np.ndarray] = {}
        self._filled: dict[str, int] = {}

    def file(
        self, requests: list[str], computed: np.ndarray, scheduled: np.ndarray, known: np.ndarray, slots_T: np.ndarray,
        routes_T_L_K: np.ndarray, blocks: list[np.ndarray], block_size: int, longest: int,
    ) -> None:
        """One step: request r has `computed[r]` positions behind it and gets the next `scheduled[r]` rows. `known[r]` are its
        tokens before the step draws: prompt and answer. The last one of an answer was drawn, not computed.
        """
        self._by_slot_S_L_K[slots_T] = routes_T_L_K
        start = 0
        for index, request in enumerate(requests):
            first, count = int(computed[index]), int(scheduled[index])
            rows = self._by_request.get(request)
            if rows is None:
                rows = np.zeros((longest, *self._by_slot_S_L_K.shape[1:]), self._by_slot_S_L_K.dtype)
                self._by_request[request] = rows
                self._filled[request] = 0
            filled = min(self._filled[request], int(known[index]) - 1)
            if filled < first:  # cached by others: their slots hold what was computed for these tokens
                positions = np.arange(filled, first)
                slots = blocks[index][positions // block_size] * block_size + positions % block_size
                rows[filled:first] = self._by_slot_S_L_K[slots]
                filled = first
            last = first + count
            if last > filled:
                rows[filled:last] = routes_T_L_K[start + filled - first : start + count]
                self._filled[request] = last
            start += count

    def take(self, request: str) -> np.ndarray | None:
        """All rows of a request, which is forgotten; None for one that never ran. Those beyond what it used mean nothing."""
        filled = self._filled.pop(request, 0)
        rows = self._by_request.pop(request, None)
        return None if rows is None else rows[:filled]


class RouteCapture:
    """Listens to the routers of one vLLM model runner. `install` once, before requests run."""

    def __init__(self, runner: Any) -> None:
        groups = runner.kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ValueError(
                f"routes cannot be captured: the cache of this model has {len(groups)} groups of layers, one is supported; set "
                "rollout.capture_routes = false")
        self._runner = runner
        self._block_size = groups[0].kv_cache_spec.block_size
        self._seen: dict[int, torch.Tensor] = {}
        self._layers: list[int] = []
        self._rows: Rows | None = None

    def install(self) -> int:
        """Bind to the routers and the runner; the number of layers. Raises ValueError for a model without routers."""
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        runner, model = self._runner, self._runner.get_model()
        self._layers = sorted(module.layer_id for module in model.modules() if isinstance(module, MoERunner))
        bind_routed_experts_capturer(model, self)  # pyright: ignore[reportArgumentType]
        plain = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._seen.clear()
            result = plain(scheduler_output, *args, **kwargs)
            if scheduler_output.total_num_scheduled_tokens:
                self._file(scheduler_output)
            return result

        runner.execute_model = execute_model
        return len(self._layers)

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Called by each router with the experts of the step's tokens [T, K]."""
        self._seen[layer_id] = topk_ids

    def take(self, requests: list[str]) -> list[tuple[bytes, tuple[int, ...], str] | None]:
        """(data, shape, dtype) of each request's rows, [P, L, K]; None for one that never ran."""
        taken = []
        for request in requests:
            rows = self._rows.take(request) if self._rows is not None else None
            taken.append(None if rows is None else (rows.tobytes(), rows.shape, rows.dtype.str))
        return taken

    def _file(self, scheduler_output: Any) -> None:
        batch, total = self._runner.input_batch, scheduler_output.total_num_scheduled_tokens
        if len(self._seen) != len(self._layers):
            raise RuntimeError(f"{len(self._seen)} of {len(self._layers)} MoE layers reported their routes")
        routes_T_L_K = torch.stack([self._seen[layer][:total] for layer in self._layers], dim=1)
        if self._rows is None:
            slots = self._runner.kv_cache_config.num_blocks * self._block_size
            experts = int(self._runner.model_config.get_num_experts())
            self._rows = Rows(slots, len(self._layers), routes_T_L_K.shape[2], np.uint8 if experts <= 256 else np.uint16)
        requests = list(batch.req_ids)
        table = batch.block_table[0]
        blocks = table.get_numpy_array()
        self._rows.file(
            requests, batch.num_computed_tokens_cpu[: len(requests)],
            np.array([scheduler_output.num_scheduled_tokens[r] for r in requests]), batch.num_tokens_no_spec[: len(requests)],
            table.slot_mapping.cpu[:total].numpy(), routes_T_L_K.numpy(), [blocks[i] for i in range(len(requests))],
            self._block_size, self._runner.max_model_len)
