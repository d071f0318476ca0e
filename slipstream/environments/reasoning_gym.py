"""Tasks of reasoning-gym: about a hundred procedural datasets (algebra, logic, games, text), each with a scorer of its own.

    pip install 'slipstream[reasoning-gym]'

    [[environments]]
    name = "palindromes"
    entry = "slipstream.environments.reasoning_gym:ReasoningGym"
    args = { dataset = "palindrome_generation", config = { max_length = 6 }, question = "letters: (.*)" }

One turn an episode. A response is judged by the dataset's own `score_answer`, in a scorer process of the reward service under
`reward.timeout_s`: what it raises, and a score that is no finite number, is that sample's failure, with the reason. Only the
coordinates of a task travel with a sample; the scorer's process makes the entry again from them, so that nothing of it is
lost in JSON (tuples, dates, boards).

Components of a score: `solved`, 1 for a full score. Many datasets give a part of a point to what is only near.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Mapping
from typing import Any

from slipstream.environment import Environment, Reset, Task, nearest
from slipstream.errors import ConfigError

SCORER = f"{__name__}:score"
BITS = 40  # of an entry's index, when there is one for every task
NEEDED = "reasoning-gym is not installed: pip install 'slipstream[reasoning-gym]'"


class ReasoningGym(Environment):
    """One dataset. Raises ConfigError at start for a name, configuration or expression that does not fit."""

    scorer = SCORER

    def __init__(
        self, dataset: str, config: Mapping[str, Any] | None = None, size: int = 0, seed: int = 0, question: str = "",
        system: str = "", answer_tag: str = "", truncated_is_wrong: bool = True,
    ) -> None:
        """`config`: arguments of the dataset's configuration. `size`: this many entries, made from `seed`; 0 = another one for
        every task. `question`: a regular expression whose first group is the part of the question that the model sees; empty =
        all. `system`: makes a chat of each question, with this system message before it. `answer_tag`: only what stands
        between the last <tag> and </tag> of a response is judged; empty = all of it."""
        if size < 0:
            raise ConfigError(f"environments.args.size = {size}; 0 or more is needed")
        self.tasks, self.truncated_is_wrong = size, truncated_is_wrong
        self._dataset, self._config, self._seed = dataset, json.dumps(dict(config or {}), sort_keys=True), seed
        self._system, self._tag = system, answer_tag
        try:
            self._question = re.compile(question, re.DOTALL) if question else None
        except re.error as error:
            raise ConfigError(f"environments.args.question = {question!r} is no regular expression: {error}") from None
        if self._question and not self._question.groups:
            raise ConfigError(f"environments.args.question = {question!r} has no group; put what the model sees in parentheses")

    def start(self) -> None:
        """Make the dataset and look at its first and last entry."""
        _open(self._dataset, self._config, self._seed)
        for index in (0, (self.tasks or 1 << BITS) - 1):
            try:
                entry = _entry(self._dataset, self._config, self._seed, index)
            except (IndexError, ValueError) as error:
                raise ConfigError(
                    f"environments.args.dataset = {self._dataset!r} has no entry {index} ({error}): its entries are numbered; "
                    f"set args.size to how many you want{', at most its config.size' if self.tasks else ''}") from None
            self._seen(entry)

    def reset(self, task: Task) -> Reset:
        """The question of the task's entry, its answer, and where the scorer finds the entry again."""
        index = task.index if self.tasks else task.random.getrandbits(BITS)
        entry = _entry(self._dataset, self._config, self._seed, index)
        answer, seen = _text(entry["answer"]), self._seen(entry)
        if self._tag and answer:
            answer = f"<{self._tag}>{answer}</{self._tag}>"
        info = {"dataset": self._dataset, "config": self._config, "seed": self._seed, "index": index, "answer_tag": self._tag}
        if self._system:
            messages = [{"role": "system", "content": self._system}, {"role": "user", "content": seen}]
            return Reset(messages=messages, answer=answer, info=info)
        return Reset(seen, answer=answer, info=info)

    def _seen(self, entry: Mapping[str, Any]) -> str:
        """The part of the question that the model sees."""
        question = entry["question"]
        if self._question is None:
            return question
        if (found := self._question.search(question)) is None or found[1] is None:
            raise ConfigError(
                f"environments.args.question = {self._question.pattern!r} is not in a question of {self._dataset}: "
                f"{question[:200]!r}")
        return found[1].strip()


def score(prompt: str, response: str, answer: str, info: Mapping[str, Any]) -> dict[str, Any]:
    """The dataset's own score of a response, 0 to 1. What the dataset raises is the caller's to report."""
    del prompt, answer  # the entry has both, as its dataset made them
    said: str | None = response.strip()
    if tag := info["answer_tag"]:
        parts = re.findall(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", response, re.DOTALL)
        said = parts[-1].strip() if parts else None
    place = info["dataset"], info["config"], info["seed"]
    value = float(_open(*place).score_answer(said, _entry(*place, info["index"])))
    return {"scalar": value, "components": {"solved": float(value >= 1)}}


@functools.lru_cache(64)
def _open(dataset: str, config: str, seed: int) -> Any:
    """The dataset. Raises ConfigError when there is none of this name and configuration."""
    try:
        # A second and a hundred modules: only where they are used.
        import reasoning_gym  # pyright: ignore[reportMissingImports]
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"{NEEDED} ({error})") from None
    if dataset not in DATASETS:
        raise ConfigError(f"environments.args.dataset = {dataset!r}: reasoning-gym has none; {nearest(dataset, DATASETS)}")
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, **json.loads(config))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"environments.args.config = {config} of {dataset}: {error}") from None


_making = threading.Lock()  # datasets are not made for threads


@functools.lru_cache(4096)  # the samples of a group have one task
def _entry(dataset: str, config: str, seed: int, index: int) -> Mapping[str, Any]:
    made = _open(dataset, config, seed)
    with _making:
        return made[index]


def _text(answer: Any) -> str:
    """An answer as text; of datasets that can judge but not answer, nothing."""
    return "" if answer is None else str(answer)
