"""Tasks from rows: a JSONL or Parquet file, or a Hugging Face dataset folder, on disk or in S3.

    [[environments]]
    name = "arithmetic"
    entry = "slipstream.environments.dataset:Dataset"
    scorer = "numeric"
    args = { path = "questions.jsonl", prompt = "question" }

Row i is task i. A row has `prompt` (text, appended to the tokens as it is) or `messages` ([{"role", "content"}], rendered
through the chat template), an `answer`, and perhaps a `scorer`; the arguments of the same names say which columns these are.
All other columns of a row go to the scorer as `info`.

What `path` may be:
    questions.jsonl, .json (one object a line), .parquet, .arrow
    folder/             all such files in it, in the order of their names: also what datasets.save_to_disk writes, and the
                        Parquet shards of the Hugging Face hub; with several splits, `split` chooses one
    s3://bucket/key     the same in S3, or in a store that speaks its protocol at `endpoint`
"""

from __future__ import annotations

import json
import math
from typing import Any

from slipstream.environment import Environment, Reset, Task, nearest
from slipstream.environments import dataset_files
from slipstream.errors import ConfigError


class Dataset(Environment):
    """One task per row, one answer per episode. Raises ConfigError at start for a path, row or column that is not there."""

    inline = True

    def __init__(
        self, path: str, prompt: str = "prompt", messages: str = "messages", answer: str = "answer", scorer: str = "scorer",
        system: str = "", split: str = "", truncated_is_wrong: bool = False, endpoint: str = "", region: str = "us-east-1",
    ) -> None:
        """`answer` = "": rows have none. `system`: makes a chat of each prompt, with this system message before it."""
        self.path, self.system, self.split = path, system, split
        self.columns = {"prompt": prompt, "messages": messages, "answer": answer, "scorer": scorer}
        self.truncated_is_wrong = truncated_is_wrong
        self._endpoint, self._region = endpoint, region
        self._rows: dataset_files.Rows = ()
        self._seen = self._answer = self._scorer = ""  # names of the columns that there are

    async def start(self) -> None:
        """Read all rows and check them."""
        self._rows = await dataset_files.read(self.path, self.split, self._endpoint, self._region)
        if not self._rows:
            raise ConfigError(f"environments.args.path = {self.path!r} has no rows; a task for each is needed")
        self._seen = self._column("prompt") or self._column("messages")
        if not self._seen:
            raise self._missing("prompt", "messages")
        self._answer, self._scorer = self._column("answer"), self._column("scorer")
        if self.columns["answer"] and not self._answer:
            raise self._missing("answer")
        if self.columns["scorer"] != "scorer" and not self._scorer:
            raise self._missing("scorer")
        for number, row in enumerate(self._rows):
            if not isinstance(row.get(self._seen), str | list):
                raise ConfigError(
                    f"{self.path}, row {number}: {self._seen} is a {type(row.get(self._seen)).__name__}; "
                    "a text or a list of messages is needed")
        self.tasks = len(self._rows)

    def reset(self, task: Task) -> Reset:
        row = self._rows[task.index]
        seen, answer, scorer = row[self._seen], text_of(row.get(self._answer)), row.get(self._scorer) or ""
        rest = {k: v for k, v in row.items() if k not in (self._seen, self._answer, self._scorer)}
        info = json.loads(json.dumps(rest, default=str))  # dates and the like as text
        if isinstance(seen, list):
            return Reset(messages=seen, answer=answer, scorer=scorer, info=info)
        if self.system:
            messages = [{"role": "system", "content": self.system}, {"role": "user", "content": seen}]
            return Reset(messages=messages, answer=answer, scorer=scorer, info=info)
        return Reset(seen, answer=answer, scorer=scorer, info=info)

    def _column(self, role: str) -> str:
        """The name of a column if the first row has it, else nothing."""
        return name if (name := self.columns[role]) in self._rows[0] else ""

    def _missing(self, *roles: str) -> ConfigError:
        wanted = " or ".join(repr(self.columns[r]) for r in roles)
        return ConfigError(
            f"environments.args.path = {self.path!r} has no column {wanted}; "
            f"{nearest(self.columns[roles[0]], list(self._rows[0]))}; name the right one, as in args.{roles[0]} = \"...\"")


def text_of(value: Any) -> str:
    """An answer as text: numbers as JSON writes them, whole ones without a point."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return str(int(value))
    return json.dumps(value, default=str)
