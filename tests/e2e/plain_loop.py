"""The oracle of the pinned schedule: the same training as one plain loop in one process, without any service.

It borrows the engine's decode function (which is checked against transformers' `generate` elsewhere), the expert kernel that
both sides share, and the environment. Loss, packing, optimizer, schedule and seeds are its own.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.rollout.decoder import Decoder
from services.rollout.engine import Request
from slipstream.environment import Task
from slipstream.environments.sort_digits import SortDigits

M64 = (1 << 64) - 1


def even_share(prompt: str, response: str, answer: str, info: dict) -> float:
    """A reward that a random model already gets some of: the share of even digits. Also the scorer of the run."""
    return sum(c in "02468" for c in response) / max(len(response), 1)


def seed_of(root: int, name: str, *counters: int) -> int:
    """SplitMix64 over the stream's name and counters."""

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & M64
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & M64
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & M64
        return x ^ x >> 31

    value = mix(root) ^ zlib.crc32(name.encode())
    for counter in counters:
        value = mix(value) ^ counter
    return mix(value)


def plain_loop(model_dir, *, steps, max_lag, groups, group_size, new_tokens, lr, slots, context, seed=0):
    """Weights after every step, 0 included: a list of state dicts."""
    torch.set_num_threads(1)
    trained, sampler = (
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, experts_implementation="dense").eval()
        for _ in "ab"
    )
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    decoder = Decoder(sampler, slots, context, deterministic=True)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True)
    versions = [{k: v.clone() for k, v in trained.state_dict().items()}]
    for step in range(1, steps + 1):
        sampler.load_state_dict(versions[max(0, step - 1 - max_lag)])
        rows, counted = [], 0
        for draw in range((step - 1) * groups, step * groups):
            reset = SortDigits().reset(Task(draw, seed_of(seed, "task/sort-digits", draw)))
            prompt = np.array(tokenizer(reset.text, add_special_tokens=False)["input_ids"], np.int32)
            answers = decoder.decode(
                [
                    Request(prompt, new_tokens, seed_of(seed, "sample", draw, i), stop_token_ids=(tokenizer.eos_token_id,))
                    for i in range(group_size)
                ]
            )
            # sort-digits: an answer cut off by the token limit is wrong, whatever it says.
            ended = [int(a.tokens[-1]) == tokenizer.eos_token_id for a in answers]
            texts = [tokenizer.decode(a.tokens, skip_special_tokens=True) for a in answers]
            rewards = np.array([even_share("", text, "", {}) if end else 0.0 for text, end in zip(texts, ended, strict=True)])
            if rewards.max() > rewards.min():
                counted += sum(len(a.tokens) for a in answers)  # also of those that are just average
                scores = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
                rows += [
                    (np.concatenate([prompt, a.tokens]), len(prompt), a.logprobs, s)
                    for a, s in zip(answers, scores, strict=True)
                    if s != 0
                ]
        rows.sort(key=lambda row: -len(row[0]))
        length = len(rows[0][0])
        ids = torch.zeros(len(rows), length - 1, dtype=torch.int64)
        for i, (tokens, *_) in enumerate(rows):
            ids[i, : len(tokens) - 1] = torch.from_numpy(tokens[:-1])
        where = [(i, t) for i, (tokens, start, *_) in enumerate(rows) for t in range(start, len(tokens))]
        targets = torch.tensor([int(rows[i][0][t]) for i, t in where])
        old = torch.from_numpy(np.concatenate([row[2] for row in rows]))
        advantages = torch.tensor([rows[i][3] for i, _ in where], dtype=torch.float32)
        hidden = trained.model(input_ids=ids, use_cache=False).last_hidden_state
        picked = hidden.reshape(-1, hidden.shape[-1])[torch.tensor([i * (length - 1) + t - 1 for i, t in where])]
        logprobs = torch.log_softmax(trained.lm_head(picked.unsqueeze(0))[0], -1).gather(1, targets[:, None])[:, 0]
        ratio = (logprobs - old).exp()
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28)).sum() / counted
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        versions.append({k: v.clone() for k, v in trained.state_dict().items()})
    return versions
