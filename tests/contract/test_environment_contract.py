"""One contract, two transports: an environment in this process and the same one over real gRPC give the same results."""

import contextlib

import pytest
from environment_cases import Broken, Guess

from slipstream import config
from slipstream.environment import (
    FINISH_LENGTH,
    Action,
    EpisodeReset,
    EpisodeStep,
    Observation,
    Reset,
    Step,
    Task,
    connect,
    load,
)
from slipstream.environments.episodes import Episodes
from slipstream.environments.server import EnvironmentServer
from slipstream.errors import Conflict, Exhausted, Fenced, NotFound, OutOfRange, SlipstreamError


@pytest.fixture(params=["in process", "over gRPC"])
def client(request):
    """Opens the client of an environment of environment_cases by class name, the same way for both transports."""

    @contextlib.asynccontextmanager
    async def opened(name: str, **settings):
        if request.param == "in process":
            async with connect(config.Environment(name="case", entry=f"environment_cases:{name}", **settings)) as client:
                yield client
        else:
            async with (
                EnvironmentServer(load(f"environment_cases:{name}")) as server,
                connect(config.Environment(name="case", address=server.address, **settings)) as client,
            ):
                yield client

    Guess.acted.clear()
    Broken.hang.clear()
    yield opened
    Broken.hang.set()


def step(episode: str, sequence: int, text: str) -> EpisodeStep:
    return EpisodeStep(episode, sequence, Action(text, [1, 2]))


@pytest.mark.parametrize("name", ["Guess", "AsyncGuess"])
async def test_an_episode_of_several_turns(client, name):
    """Reset, wrong guess, right guess: state lives between turns and the reward comes from the environment."""
    async with client(name) as c:
        assert (c.description.name, c.description.tasks, c.description.scorer) == ("case", 100, "")
        [reset] = await c.reset([EpisodeReset("a", Task(7, 5))])
        assert (reset.text, reset.info, reset.scorer) == ("guess 7?", {"index": 7}, "")
        wrong = str((int(reset.answer) + 1) % 10)
        assert await c.step([step("a", 1, wrong)]) == [Step(Observation(f"not {wrong}"), reward=0.0)]
        assert await c.step([step("a", 2, reset.answer)]) == [Step(done=True, reward=1.0, components={"turns": 2.0})]


async def test_lists_keep_their_order_and_the_same_task_is_the_same_problem(client):
    """64 resets in one call answer in order; the same (index, seed) gives the same observation and answer."""
    async with client("Guess") as c:
        tasks = [Task(i % 32, i % 32) for i in range(64)]
        results = await c.reset([EpisodeReset(f"e{i}", t) for i, t in enumerate(tasks)])
        assert [r.text for r in results] == [f"guess {i % 32}?" for i in range(64)]
        assert results[:32] == results[32:]
        assert len({r.answer for r in results}) > 3


async def test_a_repeat_answers_the_same_without_acting_twice(client):
    """Idempotence by (episode, sequence), for the last call and for older ones."""
    async with client("Guess") as c:
        reset, step1, step2 = EpisodeReset("a", Task(0, 0)), step("a", 1, "x"), step("a", 2, "y")
        first = [*await c.reset([reset]), *await c.step([step1]), *await c.step([step2])]
        again = [*await c.reset([reset]), *await c.step([step1]), *await c.step([step2])]
        assert first == again
        assert Guess.acted == ["reset", "step 1", "step 2"]


async def test_order_and_names_are_checked_item_by_item(client):
    """A gap, an unknown episode, an id taken by another task, an index beyond the end, a step after the end: each named."""
    async with client("Guess") as c:
        results = await c.reset([EpisodeReset(name, Task(index, 0)) for name, index in (("a", 0), ("b", 100), ("c", 99))])
        assert [type(r) for r in results] == [Reset, OutOfRange, Reset]
        [taken] = await c.reset([EpisodeReset("a", Task(1, 0))])
        assert isinstance(taken, Conflict)
        results = await c.step([step("a", 2, "x"), step("nobody", 1, "x"), step("c", 1, results[2].answer)])
        assert [type(r) for r in results] == [Fenced, NotFound, Step]
        assert results[0].reason == "SEQUENCE_GAP" and "send 1 next" in results[0].message
        [over] = await c.step([step("c", 2, "x")])
        assert isinstance(over, Fenced) and over.reason == "EPISODE_OVER"
        await c.close(["a", "never heard of"])
        [closed] = await c.step([step("a", 1, "x")])
        assert isinstance(closed, NotFound)


async def test_a_failing_episode_never_fails_its_list_mates(client):
    """User code that raises or returns nonsense is an INTERNAL value naming environment, episode and exception."""
    async with client("Broken") as c:
        results = await c.reset([EpisodeReset(f"e{i}", Task(i, 0)) for i in (0, 1, 2, 3, 5, 6, 7)])
        assert [getattr(r, "text", None) for r in results] == ["task 0", None, None, None, None, "task 6", None]
        raised = results[1]
        assert raised.code == 13 and raised.reason == "ENVIRONMENT_ERROR"
        assert raised.metadata["episode"] == "e1" and raised.metadata["exception"] == "ZeroDivisionError: division by zero"
        assert "reset returned int" in results[2].message
        assert "exactly one of text, messages and tokens" in results[3].message
        assert "answer = 3; a str is needed" in results[4].message
        assert "state = 3; a dict is needed" in results[6].message
        await c.reset([EpisodeReset(f"s{i}", Task(10, 0)) for i in range(4)])
        steps = await c.step([step("s0", 1, "raise"), step("s1", 1, "nan"), step("s2", 1, "nothing"), step("s3", 1, "fine")])
        assert [type(s) for s in steps] == [SlipstreamError, SlipstreamError, SlipstreamError, Step]
        for part, failed in zip(("KeyError: 'lost'", "reward = nan", "neither an observation"), steps[:3], strict=True):
            assert part in failed.message


async def test_a_hanging_episode_is_a_time_out_value(client):
    """What user code does not answer within step_timeout_s is DEADLINE_EXCEEDED for that episode alone; a retry joins it."""
    async with client("Broken", step_timeout_s=0.3) as c:
        slow, quick = EpisodeReset("slow", Task(4, 0)), EpisodeReset("quick", Task(0, 0))
        results = await c.reset([slow, quick])
        assert (results[0].code, results[0].reason) == (4, "TIMEOUT") and "of episode slow took over" in results[0].message
        assert results[1].text == "task 0"
        Broken.hang.set()
        [late] = await c.reset([slow])
        assert late.text == "task 4"


async def test_too_many_episodes_are_told_to_come_back(client):
    """Beyond max_episodes an item is RESOURCE_EXHAUSTED with a delay; closing makes room. Failed episodes take none."""
    async with client("Broken") as c:
        await c.reset([EpisodeReset(f"failed{i}", Task(1, 0)) for i in range(5)])
        results = await c.reset([EpisodeReset(f"e{i}", Task(0, 0)) for i in range(21)])
        assert isinstance(results[20], Exhausted) and results[20].retry_s == 1.0
        await c.close(["e0"])
        [again] = await c.reset([EpisodeReset("e20", Task(0, 0))])
        assert again.text == "task 0"


async def test_observations_in_three_forms_and_who_scores(client):
    """Text, messages and tokens arrive as sent; the task's scorer wins over the environment's, the run file's over both."""
    async with client("Forms") as c:
        messages, tokens, text = await c.reset([EpisodeReset(f"e{i}", Task(i, 0)) for i in range(3)])
        assert messages.messages == [{"role": "user", "content": "2+2?"}] and messages.scorer == "numeric"
        assert tokens.tokens == [3, 1, 4]
        assert (text.text, text.answer, text.scorer, text.info) == ("text", "4", "exact", {"why": ["because"]})
    async with client("Forms", scorer="regex") as c:
        assert c.description.scorer == "regex"
        assert {r.scorer for r in await c.reset([EpisodeReset(f"e{i}", Task(i, 0)) for i in range(3)])} == {"regex"}


async def test_sort_digits_ends_after_one_answer_and_a_truncated_one_is_wrong():
    """The built-in task: 4 to 8 digits and "="; an answer that ran into the token limit gets 0 without being scored."""
    async with connect(config.Environment(name="sort", entry="slipstream.environments.sort_digits:SortDigits")) as c:
        resets = await c.reset([EpisodeReset(f"e{i}", Task(i, 40 + i)) for i in range(200)])
        assert {len(r.text) for r in resets} == {5, 6, 7, 8, 9}
        assert all("".join(sorted(r.text[:-1])) == r.answer and r.text.endswith("=") for r in resets)
        done, cut = await c.step([
            step("e0", 1, resets[0].answer), EpisodeStep("e1", 1, Action(resets[1].answer, finish_reason=FINISH_LENGTH))])
        assert done == Step(done=True) and cut == Step(done=True, reward=0.0, components={"truncated": 1.0})


async def test_a_broken_environment_logs_its_traceback_once(caplog: pytest.LogCaptureFixture):
    """Twenty episodes that fail in one line of code: one traceback, then a line at every power of two, with the count."""
    episodes = Episodes(Broken(), "broken")
    results = await episodes.reset([EpisodeReset(f"e{i}", Task(2, 0)) for i in range(20)], 5)
    assert len(results) == 20 and all("reset returned int" in r.message for r in results)
    episodes.stop()
    records = [r for r in caplog.records if r.message.startswith("reset raised")]
    assert [bool(r.exc_info) for r in records] == [True, False, False, False, False]
    assert "again" in records[-1].message
