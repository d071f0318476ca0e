"""A log line is one JSON object that says which process of which run it comes from."""

import io
import json
import logging

import pytest

from slipstream import logs


@pytest.fixture
def lines():
    """Configure logging into a buffer; returns the parsed lines so far."""
    root, ours = logging.getLogger(), logging.getLogger("slipstream")
    before = root.handlers[:], root.level, ours.level
    stream = io.StringIO()
    logs.configure("rollout", "rollout-0", "demo", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def test_a_line_has_the_process_and_its_fields(lines):
    """time, level, service, instance, run, logger, message, then what the caller adds."""
    logs.get("episode").info("sample submitted", draw=17, sample=3, version=9)
    (line,) = lines()
    time = line.pop("time")
    assert time.endswith("Z") and len(time) == 24
    assert line == {
        "level": "info", "service": "rollout", "instance": "rollout-0", "run": "demo", "logger": "episode",
        "message": "sample submitted", "draw": 17, "sample": 3, "version": 9}


def test_a_field_cannot_pretend_to_be_another_process(lines):
    """Reserved names keep their value; what JSON cannot hold becomes text; a newline stays inside its line."""
    logs.get("x").warning("two\nlines %s", run="other", path=logs)
    (line,) = lines()
    assert line["run"] == "demo" and line["message"] == "two\nlines %s" and "module" in line["path"]


def test_an_exception_carries_its_traceback(lines):
    """Given, or the one that is being handled."""
    try:
        raise KeyError("lost")
    except KeyError as error:
        logs.get("x").exception("failed", error, draw=1)
        logs.get("x").exception("failed again")
    for line in lines():
        assert line["level"] == "error" and "KeyError('lost')" in line["message"]
        assert "test_an_exception_carries_its_traceback" in line["traceback"]


def test_lines_of_libraries_are_json_too(lines):
    """From warnings up."""
    logging.getLogger("aiobotocore").info("chatter")
    logging.getLogger("aiobotocore").warning("retry %d", 3)
    assert [(line["logger"], line["message"]) for line in lines()] == [("aiobotocore", "retry 3")]
