"""What the torch engine proves about a model before it serves: no list of families or machines to trust.

1. Cached decoding equals a full forward: the cache, masks and positions suit this family.
2. When deterministic: a sequence gets the same bits alone and in company, on this machine's kernels.
3. Of each version: the model holds the published bytes, and scores the trainer's probes as the trainer does (the canary).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.rollout.decoder import Decoder
from services.rollout.engine import Request
from slipstream.errors import InvalidInput
from slipstream.manifest import RawTensor
from slipstream.model import views
from slipstream.objects import Piece
from slipstream.probes import Probes

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}  # nats; a wrong mask or position is off by more
NEW_TOKENS = 3


def prove(decoder: Decoder) -> None:
    """Raises InvalidInput, naming the model's class, when a promise does not hold. Takes about ten passes."""
    name = type(decoder.model).__name__
    size = max(1, min(5, decoder.context - NEW_TOKENS - 1))
    prompts = [np.arange(i, i + max(1, size - i % 3), dtype=np.int32) % decoder.vocabulary for i in range(4)]
    requests = [Request(prompt, NEW_TOKENS, seed=i) for i, prompt in enumerate(prompts)]
    together = decoder.decode(requests)
    dtype = next(decoder.model.parameters()).dtype
    tolerance = TOLERANCE.get(dtype, 0.25)
    for prompt, answer in zip(prompts, together, strict=True):
        gap = float(np.abs(answer.logprobs - _full(decoder, np.concatenate([prompt, answer.tokens]), len(prompt))).max())
        if not gap <= tolerance:
            raise InvalidInput(
                f"{name}: cached decoding is {gap:.2g} nats off a full forward (at most {tolerance} in {dtype}): the torch "
                "engine does not suit this model; use another model or engine", "MODEL_FAMILY", model=name)
    if decoder.deterministic:
        alone = decoder.decode([Request(prompts[-1], NEW_TOKENS, seed=len(prompts) - 1)])[0]
        if alone.logprobs.tobytes() != together[-1].logprobs.tobytes():
            raise InvalidInput(
                f"{name}: a sequence gets other bits alone than in company on this machine; set schedule.deterministic = false "
                "and schedule.mode = free", "DETERMINISTIC", model=name)
    decoder.generated_tokens = 0


@torch.inference_mode()
def prove_version(decoder: Decoder, tensors: Sequence[RawTensor], probes: Probes) -> None:
    """Raises InvalidInput (CANARY) when the model is not that of `tensors`, or not that of `probes`.

    Stale or half-loaded tensors differ in their bytes; merged adapters have no bytes to compare. What is wrong with the right
    bytes (scrambled where they are used, merged wrongly) shows in the probes.
    """
    if decoder.merged is None:
        held = {t.name: t.data for t in views(decoder.model)}
        if wrong := [t.name for t in tensors if not _same(held[t.name], t.data)]:
            raise InvalidInput(
                f"the engine holds other bytes than were published in {len(wrong)} tensors, first {wrong[0]}", "CANARY",
                tensor=wrong[0])
    probes.judge(_scores(decoder, probes.tokens, 1), str(next(decoder.model.parameters()).dtype).removeprefix("torch."))


def _same(one: Piece, other: Piece) -> bool:
    return np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))


@torch.inference_mode()
def _full(decoder: Decoder, tokens: np.ndarray, start: int) -> np.ndarray:
    """Log-probabilities of tokens[start:], [T - start], in one forward without a cache."""
    return _scores(decoder, tokens[None], start)[0]


def _scores(decoder: Decoder, tokens: np.ndarray, start: int) -> np.ndarray:
    """The same of several sequences of one length, [N, T] -> [N, T - start]."""
    ids = torch.from_numpy(tokens).long().to(decoder.device)
    logits = decoder.model(input_ids=ids[:, :-1], use_cache=False).logits[:, start - 1:].float()
    return torch.log_softmax(logits, -1).gather(2, ids[:, start:, None])[..., 0].cpu().numpy()
