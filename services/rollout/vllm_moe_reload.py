"""One of two places where vLLM is patched: experts on a CPU come out scrambled when weights are loaded a second time.

`UnquantizedFusedMoEMethod._setup_kernel` packs the experts' matrices for the CPU's grouped product only at the first load. At
later ones it copies the checkpoint's layout into the packed storage: same shape, no error, other products. Packing after every
load mends it. A cousin of vllm-project/vllm issue 42821.

Other versions are left alone: the engine proves at its start that loading the same weights again changes nothing.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

AFFECTED = ("0.32.0",)  # versions in which the fault was seen and the mend tested


def apply() -> bool:
    """Mend this process's vLLM; whether there was something to mend. Idempotent. Call before a model is loaded."""
    import vllm
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.platforms import current_platform

    method: Any = unquantized_fused_moe_method.UnquantizedFusedMoEMethod
    if not current_platform.is_cpu() or vllm.__version__.split("+")[0] not in AFFECTED:
        return False
    if hasattr(method, "packs_once"):
        return True
    method.packs_once = method._setup_kernel

    def packs_always(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        again = self.moe_kernel is not None
        method.packs_once(self, layer=layer, w13=w13, w2=w2)
        if again:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method._setup_kernel = packs_always
    return True


def undo() -> None:
    """As vLLM has it: for the test that shows the fault."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method

    method: Any = unquantized_fused_moe_method.UnquantizedFusedMoEMethod
    if hasattr(method, "packs_once"):
        method._setup_kernel = method.packs_once
        del method.packs_once
