"""Scorers: a transcript in, a Score out. A failure is a Score with `failure` set and scalar 0, never an exception.

| name              | right when                                                        | runs                             |
|-------------------|-------------------------------------------------------------------|----------------------------------|
| exact             | response == answer, outer white space aside                       | inline, microseconds             |
| numeric           | the last number of the response is close to that of the answer    | inline, microseconds             |
| regex             | the answer, a pattern, is found in the response                   | process (patterns can backtrack) |
| "module:function" | what score(prompt, response, answer, info) says                   | process                          |
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from services.reward.sandbox import Sandbox
from slipstream.environment import nearest
from slipstream.errors import ConfigError, NotFound
from slipstream.protos.types.v1.sample_pb2 import Score, Transcript

RELATIVE_TOLERANCE = 1e-6
ABSOLUTE_TOLERANCE = 1e-9

# A sign belongs to the number unless something stands before it: the last number of "5-3" is 3, that of "x = -3" is -3.
_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:\d+(?:,\d{3})*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)


Done = Callable[[int, Score, float], None]


class Scorer(Protocol):
    """One way to judge a transcript, fast enough to run inline. May raise: the caller turns that into `failure`."""

    def __call__(self, transcript: Transcript) -> Score: ...


def exact(transcript: Transcript) -> Score:
    """1 when response and answer are equal, outer white space aside."""
    return Score(scalar=float(transcript.response.strip() == transcript.answer.strip()))


def numeric(transcript: Transcript) -> Score:
    """1 when the last numbers of response and answer are close.

    info may set rel_tol (default 1e-6) and abs_tol (default 1e-9), as in math.isclose. "1,234.5" is one number.
    Component `answered`: 1 when the response has a number at all. An answer without a number is a failure.
    """
    right = last_number(transcript.answer)
    if right is None:
        return failed(f"answer without a number: {transcript.answer[:80]!r}")
    info = json.loads(transcript.info_json) if transcript.info_json else {}
    said = last_number(transcript.response)
    close = said is not None and math.isclose(
        said, right, rel_tol=float(info.get("rel_tol", RELATIVE_TOLERANCE)),
        abs_tol=float(info.get("abs_tol", ABSOLUTE_TOLERANCE)))
    return Score(scalar=float(close), components={"answered": float(said is not None)})


def last_number(text: str) -> float | None:
    """The last finite number in `text`: sign, thousands commas, decimals and exponents are understood."""
    matches = _NUMBER.findall(text.replace("−", "-"))
    for match in reversed(matches):
        if math.isfinite(value := float(match.replace(",", ""))):
            return value
    return None


INLINE: dict[str, Scorer] = {"exact": exact, "numeric": numeric}
NAMES = (*INLINE, "regex")


def failed(reason: str) -> Score:
    """A score that names why there is none."""
    return Score(scalar=0.0, failure=reason)


def unknown(scorer: str) -> str:
    """Why a scorer's name cannot be used; empty when it can."""
    module, colon, function = scorer.partition(":")
    if scorer in NAMES or (colon and module and function):
        return ""
    return f'unknown scorer {scorer!r}; {nearest(scorer, NAMES)}, or "module:function"'


class Scorers:
    """Scores transcripts by name: inline, or in the sandbox. `failures` counts kinds of reasons."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.scored = 0
        self.failures: Counter[str] = Counter()

    async def check(self, scorer: str) -> None:
        """Raise ConfigError when a scorer of the run file is unknown or cannot be imported."""
        if reason := unknown(scorer):
            raise ConfigError(f"environments.scorer: {reason}")
        if ":" in scorer and (reason := await self.sandbox.load(scorer)):
            raise ConfigError(
                f"environments.scorer = {scorer!r}: {reason}; start where the module can be imported, or set PYTHONPATH")

    async def score(self, transcripts: Sequence[Transcript], done: Done) -> None:
        """Score all; `done(i, score, seconds)` is called for each as soon as it is known, for inline ones before the first
        await. `seconds` is the time of the call, 0 when none was made.
        """
        beside: list[Awaitable[None]] = []
        for i, transcript in enumerate(transcripts):
            if (scorer := INLINE.get(transcript.scorer)) is not None:
                started = time.perf_counter()
                score = _inline(scorer, transcript)
                self._finish(i, score, time.perf_counter() - started, done)
            elif reason := unknown(transcript.scorer):
                self._finish(i, failed(reason), 0.0, done)
            else:
                beside.append(self._beside(i, transcript, done))
        if beside:
            await asyncio.gather(*beside)

    async def score_all(self, transcripts: Sequence[Transcript]) -> list[Score | NotFound]:
        """One result each, in order: a score, or NotFound for an unknown scorer."""
        results: list[Score | NotFound] = [NotFound(unknown(t.scorer), "SCORER", scorer=t.scorer) for t in transcripts]

        def done(i: int, score: Score, seconds: float) -> None:
            if not unknown(transcripts[i].scorer):
                results[i] = score

        await self.score(transcripts, done)
        return results

    async def _beside(self, i: int, transcript: Transcript, done: Done) -> None:
        score, seconds = await self.sandbox.score(transcript)
        self._finish(i, score, seconds, done)

    def _finish(self, i: int, score: Score, seconds: float, done: Done) -> None:
        self.scored += 1
        if score.failure:
            self.failures[kind_of_failure(score.failure)] += 1
        done(i, score, seconds)


def kind_of_failure(reason: str) -> str:
    """A short, bounded label: "timeout after 10 s" → timeout, "exception: KeyError: 'x'" → KeyError."""
    first, _, rest = reason.partition(": ")
    return rest.partition(":")[0] if first == "exception" else first.split(" ")[0]


def _inline(scorer: Scorer, transcript: Transcript) -> Score:
    try:
        return scorer(transcript)
    except Exception as error:
        return failed(f"exception: {type(error).__name__}: {error}"[:500])
