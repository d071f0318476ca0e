"""Rows of supervised training, for the warm-up and for `slipstream sft`: what a model is given, and which tokens it learns.

Tokens are made as an episode makes them: the prompt is encoded by itself and the answer follows, so a model is trained on the
very tokens that it will be asked to sample. The end of an answer is a token that ends it for the sampler, too.

Worked example: prompt 5 6, answer 7 1 become inputs 5 6 7, targets 7 1 at positions 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from services.trainer.packing import Row
from slipstream.environments import dataset_files
from slipstream.environments.dataset import text_of
from slipstream.errors import ConfigError


def row(tokens: Sequence[int], learnt: Sequence[bool]) -> Row:
    """A row whose targets are the `learnt` tokens. The first token cannot be: nothing predicts it."""
    ids, positions = np.array(tokens, np.int32), np.flatnonzero(learnt)
    nothing = np.zeros(len(positions))
    return Row(ids[:-1], positions - 1, ids[positions], nothing.astype(np.float32), nothing.astype(np.int64))


def prompt_and_answer(prompt: Sequence[int], answer: Sequence[int]) -> Row:
    """A row that learns the answer."""
    return row([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))


def encoded(tokenizer: Any, text: str, whose: str) -> list[int]:
    """Token ids of a text, nothing added. Raises ConfigError for what the tokenizer does not know."""
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # tokenizers raise bare Exception
        raise ConfigError(
            f"the tokenizer cannot encode {text[:80]!r} of {whose} ({error}); is a character missing?") from error


class Reader:
    """Rows of a dataset. `stops`: tokens that end an answer. All errors are ConfigError and name row, field and remedy."""

    def __init__(self, tokenizer: Any, stops: Sequence[int], settings: Any) -> None:
        self._tokenizer, self._stops, self._settings = tokenizer, set(stops), settings

    async def records(self) -> dataset_files.Rows:
        """What the dataset holds. Raises ConfigError for a path, split or column that is not there."""
        return await dataset_files.of_sft(self._settings)

    def rows(self, record: Mapping[str, Any], number: int) -> list[Row]:
        """One record: a row; of a chat, one for each stretch of turns that the template only adds to."""
        place, settings = f"{Path(self._settings.path).name}, row {number}", self._settings
        if record.get(settings.prompt) is not None:
            return [self._plain(record, place)]
        messages = record.get(settings.messages)
        if messages is None:
            raise ConfigError(
                f"{place} has neither {settings.prompt!r} nor {settings.messages!r} but {', '.join(record) or 'nothing'}; name "
                "the column with sft.prompt or sft.messages")
        self._check_chat(messages, f"{place}, {settings.messages}")
        if record.get(settings.answer) is not None:
            messages = [*messages, {"role": "assistant", "content": self._answer(record, place)}]
        if messages[-1]["role"] != "assistant":
            raise ConfigError(
                f"{place}, {settings.messages}: the last message is the {messages[-1]['role']}'s: nothing to learn; "
                f"end with the assistant's, or give the answer in {settings.answer!r}")
        return self._chat(messages, f"{place}, {settings.messages}")

    def _plain(self, record: Mapping[str, Any], place: str) -> Row:
        settings, prompt = self._settings, record[self._settings.prompt]
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f"{place}, {settings.prompt}: {prompt!r} is no text; a prompt of some tokens is needed")
        answer = self._answer(record, place)
        if settings.system:
            chat = [{"role": "system", "content": settings.system}, {"role": "user", "content": prompt}]
            return self._chat([*chat, {"role": "assistant", "content": answer}], place)[0]
        tokens = encoded(self._tokenizer, prompt, f"{place}, {settings.prompt}")
        if not tokens:
            raise ConfigError(f"{place}, {settings.prompt}: {prompt!r} gives no token; at least one is needed")
        return prompt_and_answer(tokens, self._ended(answer, f"{place}, {settings.answer}"))

    def _answer(self, record: Mapping[str, Any], place: str) -> str:
        answer = record.get(self._settings.answer)
        if answer is None or answer == "" or isinstance(answer, dict | list):
            raise ConfigError(
                f"{place}, {self._settings.answer}: {answer!r} is no answer to learn; give a text or a number, or name another "
                "column with sft.answer")
        return text_of(answer)

    def _check_chat(self, messages: Any, place: str) -> None:
        if not isinstance(messages, list) or not messages:
            raise ConfigError(f"{place}: {messages!r} is no list of messages; give [{{\"role\": ..., \"content\": ...}}, ...]")
        for i, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise ConfigError(f"{place}, message {i}: {str(message)[:80]} lacks role or content; both are needed")

    def _chat(self, messages: Sequence[Mapping[str, Any]], place: str) -> list[Row]:
        """Every turn of the assistant is learnt. A prompt that does not extend the tokens before it opens another row."""
        rows: list[Row] = []
        tokens: list[int] = []
        learnt: list[bool] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked, said = self._rendered(messages[:i], True, place), self._rendered(messages[: i + 1], False, place)
            if not said.startswith(asked):
                raise ConfigError(
                    f"{place}, message {i}: the chat template renders the turn otherwise than it asks for it, so what the "
                    "model would have to say is not known; use a template with a generation prompt")
            prompt, answer = encoded(self._tokenizer, asked, place), self._ended(said[len(asked):], place)
            if not prompt:
                raise ConfigError(f"{place}, message {i}: nothing comes before it; begin with a user's message")
            if learnt and prompt[: len(tokens)] != tokens:
                rows.append(row(tokens, learnt))
                tokens, learnt = [], []
            learnt += [False] * (len(prompt) - len(tokens)) + [True] * len(answer)
            tokens = [*prompt, *answer]
        return [*rows, row(tokens, learnt)]

    def _rendered(self, messages: Sequence[Mapping[str, Any]], ask: bool, place: str) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=ask)
        except Exception as error:  # jinja's, and whatever a template raises
            raise ConfigError(
                f"{place}: the tokenizer cannot render a chat ({' '.join(str(error).split())[:160]}); give prompt and answer "
                "as text, or a model with a chat template") from error

    def _ended(self, text: str, place: str) -> list[int]:
        """An answer up to the token that ends it; one is added when it has none."""
        tokens = encoded(self._tokenizer, text, place)
        ends = [i for i, token in enumerate(tokens) if token in self._stops]
        if ends:
            return tokens[: ends[-1] + 1]
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                f"{place}: the tokenizer has no end token, so the model would not learn to stop; set eos_token in its files")
        return [*tokens, self._tokenizer.eos_token_id]
