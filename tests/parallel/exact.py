"""float64 all the way: through transformers' models, which round norms, routers and softmaxes to float32, and through FSDP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.overrides import TorchFunctionMode

_factors = _fsdp_collectives._get_gradient_divide_factors


class _Exact(TorchFunctionMode):
    """What is float64 stays it: a request for float32 is one for float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if any(isinstance(a, torch.Tensor) and a.dtype == torch.float64 for a in args):
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _as_of_float32(scatter: Any, reduce: Any, dtype: torch.dtype, *others: Any, **named: Any) -> Any:
    return _factors(scatter, reduce, torch.float32, *others, **named)


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Learners inside keep float64, and FSDP averages it as it does float32: what overflows in float16 it divides in two steps,
    and in a group of one rank (torch 2.13) twice.
    """
    with _Exact(), mock.patch.object(_fsdp_collectives, "_get_gradient_divide_factors", _as_of_float32):
        yield
