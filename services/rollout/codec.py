"""Text to tokens and back, by the model's own tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slipstream.errors import InvalidInput

CACHED = 4096  # texts whose tokens are remembered: the samples of a group begin with the same one


class Codec:
    """What episodes need of a tokenizer. Raises InvalidInput for what it cannot take."""

    def __init__(self, tokenizer: Any, stop_token_ids: tuple[int, ...]) -> None:
        self.stop_token_ids = stop_token_ids
        self._tokenizer = tokenizer
        # The Rust tokenizer behind it: the same results for a tenth of the time, which a sample of the demo would feel.
        plain = getattr(tokenizer, "is_fast", False) and not getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self._fast = tokenizer.backend_tokenizer if plain else None
        self.encode = functools.lru_cache(CACHED)(self._encode)

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """Text of token ids, with or without special tokens."""
        return (self._fast or self._tokenizer).decode(tokens, skip_special_tokens=not special)

    def decode_all(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """Texts of several answers, without special tokens. One call: each lets another thread take the interpreter."""
        if self._fast is not None:
            return self._fast.decode_batch(answers, skip_special_tokens=True)
        return [self.decode(answer) for answer in answers]

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation in the model's chat template, up to where the assistant speaks."""
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # jinja2's errors, and ValueError for a tokenizer without a template
            raise InvalidInput(f"the chat template cannot render the messages: {error}", "CHAT_TEMPLATE") from error

    def _encode(self, text: str) -> np.ndarray:
        """Tokens of a text, int32 [T], read-only; no special tokens are added."""
        try:
            if self._fast is not None:
                ids = self._fast.encode(text, add_special_tokens=False).ids
            else:
                ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # tokenizers raises bare Exception
            raise InvalidInput(f"the tokenizer cannot encode {text[:80]!r}: {error}", "TOKENIZE") from error
        tokens = np.asarray(ids, np.int32)
        tokens.flags.writeable = False
        return tokens
