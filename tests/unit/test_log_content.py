"""Log lines carry neither proofs of identity nor, unless the run asks for it, text that may quote a prompt."""

import io
import json
import logging

import pytest

from slipstream import logs

PROMPT = "my secret diary"


@pytest.fixture(params=[False, True], ids=["withheld", "asked for"])
def written(request):
    """(content asked for, function that gives the lines so far)."""
    root, ours = logging.getLogger(), logging.getLogger("slipstream")
    before = root.handlers[:], root.level, ours.level
    stream = io.StringIO()
    logs.configure("rollout", "rollout-0", "demo", stream, content=request.param)
    yield request.param, lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


@pytest.mark.parametrize("text, left", [
    (f"environment e: reset raised KeyError: '{PROMPT}' (mine.py:12)", "environment e: reset raised KeyError"),
    (f"exception: mine.Boom: {PROMPT}", "exception: mine.Boom"),
    (f"non-finite: {PROMPT}", "non-finite"),
    (f"mine.SomeError: {PROMPT}", "mine.SomeError"),
    (f"{PROMPT} has no number", ""),
    (f"{PROMPT.title()}: ValueError", ""),
])
def test_a_failure_is_shortened_to_its_kind(written, text, left):
    """What a user's environment or scorer says may quote the prompt; its kind is enough to count and find it."""
    asked, lines = written
    logs.get("x").warning("scorer failed", failure=logs.Content(text), draw=3)
    (line,) = lines()
    assert line["failure"] == (text if asked else f"{left} {logs.WITHHELD}".strip()) and line["draw"] == 3


def test_an_exception_that_may_quote_keeps_its_frames(written):
    """Type and place of the exception and of its cause, without what they say."""
    asked, lines = written
    try:
        try:
            raise ValueError(PROMPT)
        except ValueError as cause:
            raise KeyError(PROMPT) from cause
    except KeyError as error:
        logs.get("x").exception("reset raised", error, quotes=True)
        logs.get("x").exception("of our own", RuntimeError("a bug"))
    quoting, own = lines()
    assert (PROMPT in json.dumps(quoting)) is asked
    assert quoting["message"].startswith("reset raised: KeyError")
    assert "test_log_content.py" in quoting["traceback"] and "ValueError" in quoting["traceback"]
    assert own["message"] == "of our own: RuntimeError('a bug')" and "RuntimeError: a bug" in own["traceback"]


@pytest.mark.parametrize("said, shown", [
    ("sent authorization: Bearer eyJuYW1lIjoi.c2lnbmF0dXJl to h", "sent authorization: Bearer *** to h"),
    ("Slipstream trainer:0123456789abcdef", "Slipstream trainer:***"),
    ("rediss://user:p4ss@host:6379/0 is down", "rediss://user:***@host:6379/0 is down"),
    ("http://127.0.0.1:43210/metrics of user@host", "http://127.0.0.1:43210/metrics of user@host"),
])
def test_proofs_of_identity_are_never_written(written, said, shown):
    """Tokens and passwords in any message or field, asked for or not."""
    _, lines = written
    logs.get("x").info(said, field=said)
    (line,) = lines()
    assert line["message"] == shown and line["field"] == shown
