"""What the ranks of tests find imported already: see ranks.py. One thread, so that it may fork."""

import importlib

import torch

for name in ("torch.distributed.tensor", "torch.optim", "transformers.distributed.expert_parallel"):
    importlib.import_module(name)
torch.set_num_threads(1)
