"""What runs inside vLLM's worker process: weights from a file, checked and loaded, and the routes of finished requests.

vLLM mixes this class into its worker (`worker_extension_cls`), and the engine calls its methods by name. Importing the module
mends vLLM, before the worker loads a model.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open

from services.rollout import vllm_moe_reload, vllm_temperatures
from services.rollout.vllm_checkpoint import checksum
from services.rollout.vllm_routes import RouteCapture

vllm_moe_reload.apply()
vllm_temperatures.apply()


class WorkerExtension:
    """Methods of the worker, named so that they cannot collide with vLLM's."""

    model_runner: Any
    _slipstream_routes: RouteCapture | None = None

    def slipstream_capture(self) -> int:
        """Begin to record routes; the number of MoE layers."""
        self._slipstream_routes = RouteCapture(self.model_runner)
        return self._slipstream_routes.install()

    def slipstream_routes(self, requests: list[str]) -> list[Any]:
        """The recorded routes of requests that have ended; see RouteCapture.take."""
        if self._slipstream_routes is None:
            return [None] * len(requests)
        return self._slipstream_routes.take(requests)

    def slipstream_prove_temperatures(self) -> None:
        """Raises ValueError where guessed tokens would be judged at other temperatures than their requests'."""
        vllm_temperatures.prove(self.model_runner.device)

    def slipstream_verify(self, path: str, crc32c: int) -> int:
        """Read a checkpoint in full and open each of its tensors: their number. Raises ValueError; the model is not touched."""
        found = checksum(path)
        if found != crc32c:
            raise ValueError(f"{path}: checksum {found:08x} is not the {crc32c:08x} that was written")
        return sum(1 for _ in tensors(path))

    def slipstream_load(self, path: str) -> int:
        """Load a verified checkpoint into the model that serves, layer by layer; the number of parameters written.

        An error here leaves the model between two versions: the engine has to be started anew.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model_runner.get_model()
        with torch.no_grad():
            initialize_layerwise_reload(model)
            loaded = model.load_weights(tensors(path))
            finalize_layerwise_reload(model, self.model_runner.model_config)
        missing = [name for name, _ in model.named_parameters() if loaded is not None and name not in loaded]
        if missing:
            raise ValueError(f"{path}: {len(missing)} parameters of the engine were not in the checkpoint, first {missing[0]}")
        torch.accelerator.synchronize()  # vLLM makes this nothing on a CPU
        return len(loaded or ())


def tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a safetensors file by name."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            yield name, file.get_tensor(name)
