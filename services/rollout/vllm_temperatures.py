"""One of two places where vLLM is patched: on a CPU, guessed tokens are judged at temperatures that were never written.

With speculation every request has several rows of logits in a step, and `expand_batch_to_tokens` gives each row its request's
temperature, top-k and top-p. vLLM's replacement for the GPU kernel (`vllm.utils.cpu_triton_utils._expand_kernel_impl`) fills a
copy of the buffer and throws it away: rows are divided by whatever the memory held. vllm-project/vllm issue 55005.

Versions in which the fault was not seen are left alone, and whoever speculates proves the function first: `prove`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

AFFECTED = ("0.32.0",)  # versions in which the fault was seen and the mend tested


def apply() -> bool:
    """Mend this process's vLLM; whether there was something to mend. Idempotent."""
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    sampler: Any = rejection_sampler
    if not current_platform.is_cpu() or vllm.__version__.split("+")[0] not in AFFECTED:
        return False
    if not hasattr(sampler, "expands_into_a_copy"):
        sampler.expands_into_a_copy = sampler.expand_batch_to_tokens
        sampler.expand_batch_to_tokens = expanded
    return True


def undo() -> None:
    """As vLLM has it: for the test that shows the fault."""
    from vllm.v1.sample import rejection_sampler

    sampler: Any = rejection_sampler
    if hasattr(sampler, "expands_into_a_copy"):
        sampler.expand_batch_to_tokens = sampler.expands_into_a_copy
        del sampler.expands_into_a_copy


def expanded(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """vLLM's expand_batch_to_tokens: x [requests], and where each one's rows end, as [rows], in x's dtype.

    Example: [a, b, c] with ends [2, 5, 6] is [a, a, b, b, b, c]; entries equal to `replace_from` become `replace_to`.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def prove(device: Any) -> None:
    """Raises ValueError where rows do not get the values of their requests. In the process of the worker, on its device."""
    import torch
    from vllm.v1.sample import rejection_sampler

    ends = torch.tensor([2, 3, 6], dtype=torch.int32, device=device)
    for a, b in ((0.5, 2.0), (0.25, 4.0)):  # memory that is not written may hold what it should, but not both times
        given = torch.tensor([a, 0.0, b], device=device)
        found = rejection_sampler.expand_batch_to_tokens(given, ends, 6, replace_from=0, replace_to=1).tolist()
        if found != [a, a, 1.0, b, b, b]:
            raise ValueError(
                f"rollout.speculation: this vLLM spreads the temperatures {a}, 0 (greedy), {b} over 2, 1, 3 rows as {found}: "
                'guessed tokens would be sampled from another distribution; use another version of vLLM, or method = "off"')
