"""One step of GRPO as a good plain script takes it: transformers, torch.optim.AdamW, nothing of ours.

What `benchmarks.trainer` holds the trainer's step against. It has whatever helps: the fastest expert kernel, fused AdamW,
groups without signal left out, rows sorted by length and padded on the right, so that causal attention needs no mask, and
logits of generated tokens only. It lacks what the trainer always has: checks of its input, entropy, diagnostics, lags,
sequence-level parts, route replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from slipstream.config import RunFile


@dataclass
class Answer:
    """One answer: all its tokens, how many of them are the prompt, and what the sampler thought of the rest."""

    tokens: torch.Tensor  # int64 [T]
    prompt: int
    logprobs: torch.Tensor  # float32 [T - prompt]
    reward: float


class BareStep:
    """Model and optimizer of the plain loop."""

    def __init__(self, path: str, run: RunFile) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="grouped_mm").eval()
        trainer = run.trainer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=trainer.learning_rate, betas=trainer.betas, eps=trainer.eps,
            weight_decay=trainer.weight_decay, fused=True)
        self.budget, self.max_norm = trainer.tokens_per_microbatch, trainer.max_grad_norm
        self.low, self.high = 1 - run.algorithm.clip_low, 1 + run.algorithm.clip_high

    def step(self, groups: list[list[Answer]]) -> float:
        """One optimizer step. Returns the loss."""
        rows: list[tuple[Answer, float]] = []
        for group in groups:
            rewards = torch.tensor([answer.reward for answer in group])
            if rewards.min() < rewards.max():
                advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
                rows += zip(group, advantages.tolist(), strict=True)
        rows.sort(key=lambda row: -len(row[0].tokens))
        count = sum(len(answer.logprobs) for answer, _ in rows)
        start, loss = 0, 0.0
        while start < len(rows):
            size = max(1, self.budget // (len(rows[start][0].tokens) - 1))
            share = self.loss(rows[start:start + size]) / count
            share.backward()
            loss, start = loss + share.item(), start + size
        if rows:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm, foreach=True)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss

    def loss(self, rows: list[tuple[Answer, float]]) -> torch.Tensor:
        """The clipped objective, summed over the generated tokens of a micro-batch."""
        tokens = torch.nn.utils.rnn.pad_sequence([answer.tokens for answer, _ in rows], batch_first=True)
        places = torch.arange(1, tokens.shape[1])
        first = torch.tensor([[answer.prompt] for answer, _ in rows])
        last = torch.tensor([[len(answer.tokens)] for answer, _ in rows])
        mask = (places >= first) & (places < last)
        hidden = self.model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state[mask]
        found = self.model.lm_head(hidden).log_softmax(-1).gather(1, tokens[:, 1:][mask].unsqueeze(1)).squeeze(1)
        ratio = (found - torch.cat([answer.logprobs for answer, _ in rows])).exp()
        advantages = torch.tensor([advantage for _, advantage in rows]).repeat_interleave(mask.sum(1))
        return -torch.minimum(ratio * advantages, ratio.clamp(self.low, self.high) * advantages).sum()
