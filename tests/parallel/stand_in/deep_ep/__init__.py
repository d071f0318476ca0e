"""A stand-in for DeepEP 2.1.0 on gloo: strict where the library hangs, corrupts or aborts, and slow.

Its interface is that of deep_ep/buffers/elastic.py, argument by argument (tests/parallel/stand_in/signatures.json); only the
demand for GPU tensors is dropped. It does what the library is free to do and a caller must stand: rows of a source
come in any order, what nobody wrote is NaN, a call that differs between ranks raises at once where the library would wait.
Compact mode; `do_expand` is for inference and is refused.
"""

from __future__ import annotations

import torch

from .buffer import Buffer, ElasticBuffer
from .events import EventHandle, EventOverlap
from .handle import EPHandle

__version__ = "2.1.0"
topk_idx_t = torch.int64

__all__ = ["Buffer", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "topk_idx_t"]
