"""The worker extension of vLLM with faults that tests turn on. Runs in vLLM's process."""

from __future__ import annotations

from services.rollout import vllm_moe_reload, vllm_temperatures
from services.rollout.vllm_worker import WorkerExtension


class FaultyExtension(WorkerExtension):
    slipstream_break_load = False

    def slipstream_mend(self, on: bool) -> bool:
        """Take the mend of the experts' reload away, or apply it."""
        if not on:
            vllm_moe_reload.undo()
            return False
        return vllm_moe_reload.apply()

    def slipstream_mend_temperatures(self, on: bool) -> bool:
        """Take the mend of guessed tokens' temperatures away, or apply it."""
        if not on:
            vllm_temperatures.undo()
            return False
        return vllm_temperatures.apply()

    def slipstream_fail_next_load(self) -> None:
        """The next load writes half of the tensors and raises."""
        model = self.model_runner.get_model()
        plain = model.load_weights

        def half(weights):
            model.load_weights = plain
            given = list(weights)
            plain(iter(given[: len(given) // 2]))
            raise OSError("the disk went away")

        model.load_weights = half
