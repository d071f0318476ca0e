"""What each scorer answers, and that no scorer, however broken, does more harm than a named failure of its own sample."""

import time
from pathlib import Path

import pytest

from services.reward.sandbox import Sandbox
from services.reward.scorers import Scorers, kind_of_failure, last_number
from slipstream.errors import ConfigError, NotFound
from slipstream.protos.types.v1.sample_pb2 import Score, Transcript

pytestmark = pytest.mark.slow


@pytest.fixture
async def scorers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    async with Sandbox(processes=1, timeout_s=1.0) as sandbox:
        yield Scorers(sandbox)


async def one(scorers: Scorers, scorer: str, response: str, answer: str = "", **more: str) -> Score | NotFound:
    [score] = await scorers.score_all([Transcript(scorer=scorer, response=response, answer=answer, **more)])
    return score


@pytest.mark.parametrize(("response", "answer", "scalar"), [
    ("1134", "1134", 1), ("1134 \n", "1134", 1), ("11345", "1134", 0), ("", "1134", 0), ("ABC", "abc", 0)])
async def test_exact_is_equality_but_for_outer_white_space(scorers, response, answer, scalar):
    """Nothing else is forgiven: neither case nor a prefix."""
    assert await one(scorers, "exact", response, answer) == Score(scalar=scalar)


@pytest.mark.parametrize(("text", "number"), [
    ("3+4 is 7.", 7), ("so x = -3", -3), ("5-3", 3), ("5 - 3", 3), ("−2", -2), ("1,234.5 dollars", 1234.5), ("#### 72", 72),
    ("$.5", 0.5), ("2e3", 2000), ("6.02E+23 per mole", 6.02e23), ("1,2", 2), ("(-4)", -4), ("none", None), ("9e999", None),
    ("7 then 9e999", 7), ("v2 is 10%", 10)])
def test_the_last_number_of_a_text(text, number):
    """Signs, thousands, decimals and exponents; what is no finite number is passed over."""
    assert last_number(text) == number


@pytest.mark.parametrize(("response", "answer", "info", "scalar", "answered"), [
    ("The answer is 7.", "7", "", 1, 1), ("7.0000001", "7", "", 1, 1), ("7.01", "7", "", 0, 1),
    ("7.01", "7", '{"abs_tol": 0.02}', 1, 1),
    ("95", "100", '{"rel_tol": 0.06}', 1, 1), ("no idea", "7", "", 0, 0), ("1,234", "#### 1234", "", 1, 1)])
async def test_numeric_compares_last_numbers_within_tolerances(scorers, response, answer, info, scalar, answered):
    """Tolerances come with the task; the component says whether there was a number at all."""
    score = await one(scorers, "numeric", response, answer, info_json=info)
    assert score == Score(scalar=scalar, components={"answered": answered})


async def test_numeric_without_a_right_number_is_a_failure(scorers):
    """A broken task is not a wrong answer: it is named and counted."""
    assert (await one(scorers, "numeric", "7", "seven")).failure == "answer without a number: 'seven'"
    assert scorers.failures == {"answer": 1}


async def test_regex_searches_the_answer_as_a_pattern(scorers):
    """Anchors are the task's business; a pattern that does not compile is a failure."""
    assert (await one(scorers, "regex", "it is 42!", r"\b42\b")).scalar == 1
    assert (await one(scorers, "regex", "it is 421", r"\b42\b")).scalar == 0
    assert "PatternError" in (bad := (await one(scorers, "regex", "x", "(")).failure) or "error" in bad


async def test_a_backtracking_pattern_is_killed(scorers):
    """re holds the interpreter lock for ages on (a+)+$; only another process can be stopped."""
    started = time.monotonic()
    assert (await one(scorers, "regex", "a" * 40 + "b", "(a+)+$")).failure == "timeout after 1 s"
    assert time.monotonic() - started < 5
    assert (await one(scorers, "regex", "ab", "b")).scalar == 1


async def test_callables_answer_numbers_or_dicts(scorers):
    """Floats, bools and numpy numbers; a dict adds components and values per turn; coroutines too; prints do no harm."""
    assert (await one(scorers, "scorer_cases:length", "12345")).scalar == 0.5
    assert await one(scorers, "scorer_cases:rich", "r", prompt="abc", info_json='{"bonus": 2}') == Score(
        scalar=0.5, per_turn=[0.25, 0.25], components={"prompt": 3, "bonus": 2})
    assert (await one(scorers, "scorer_cases:later", "a", "a")).scalar == 1
    assert (await one(scorers, "scorer_cases:prints", "")).scalar == 1


@pytest.mark.parametrize(("scorer", "failure", "kind"), [
    ("scorer_cases:raises", "exception: ZeroDivisionError: division by zero", "ZeroDivisionError"),
    ("scorer_cases:infinite", "non-finite: components = inf", "non-finite"),
    ("scorer_cases:nothing", "exception: TypeError: scalar is a NoneType, not a number", "TypeError"),
    ("scorer_cases:leaves", "died: the scorer ended its process, exit status 3", "died"),
    ("scorer_cases:hangs_on_demand", "timeout after 1 s", "timeout"),
    ("scorer_cases:lost", "exception: AttributeError: module 'scorer_cases' has no attribute 'lost'", "AttributeError"),
    ("no_such_module:f", "exception: ModuleNotFoundError: No module named 'no_such_module'", "ModuleNotFoundError")])
async def test_failures_are_data_with_a_reason(scorers, scorer, failure, kind):
    """Whatever happens in user code, the score says it, counts as 0, and the next score is right."""
    score = await one(scorers, scorer, "hang")
    assert (score.scalar, score.failure) == (0, failure)
    assert scorers.failures == {kind: 1} and kind_of_failure(failure) == kind
    assert (await one(scorers, "scorer_cases:length", "1")).scalar == 0.1


async def test_an_unknown_scorer_is_named_with_the_nearest(scorers):
    """NOT_FOUND for a caller of the service, a named failure for a sample, a ConfigError at start."""
    unknown = await one(scorers, "exat", "x")
    assert isinstance(unknown, NotFound) and "did you mean 'exact'?" in unknown.message
    with pytest.raises(ConfigError, match="did you mean 'numeric'"):
        await scorers.check("numerik")
    with pytest.raises(ConfigError, match="has no attribute 'lenght'"):
        await scorers.check("scorer_cases:lenght")
    await scorers.check("scorer_cases:length")


async def test_one_hanging_answer_holds_back_nobody(scorers):
    """199 good answers around a hanging one are scored before its time limit, in one process plus one that steps in."""
    transcripts = [Transcript(scorer="scorer_cases:hangs_on_demand", response="hang" if i == 100 else "") for i in range(200)]
    order: list[int] = []
    await scorers.score(transcripts, lambda i, score, seconds: order.append(i))
    assert order[-1] == 100 and sorted(order) == list(range(200))
    assert scorers.sandbox.kills == 1


async def test_built_in_scorers_cost_microseconds(scorers):
    """512 transcripts within 10 ms of CPU time (best of five), before the first await."""
    for scorer in ("exact", "numeric"):
        transcripts = [Transcript(scorer=scorer, response="the sum of 3 and 4 is 7", answer="7")] * 512
        times = []
        for _ in range(5):
            started = time.process_time()
            await scorers.score_all(transcripts)
            times.append(time.process_time() - started)
        assert min(times) < 0.010, f"{scorer}: {min(times) * 1e3:.1f} ms"
