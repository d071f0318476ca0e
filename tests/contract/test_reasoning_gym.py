"""Tasks of reasoning-gym: each reaches the model, is judged by its own dataset, and fails by name when something is wrong."""

import json
from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym", reason="needs pip install 'slipstream[reasoning-gym]'")

from services.reward.sandbox import Sandbox
from services.reward.scorers import Scorers
from slipstream import config
from slipstream.environment import EpisodeReset, Reset, Task, connect, describe
from slipstream.environments.reasoning_gym import ReasoningGym, score
from slipstream.errors import ConfigError
from slipstream.protos.types.v1.sample_pb2 import Transcript

pytestmark = pytest.mark.slow  # three seconds of imports
EXAMPLES = Path(__file__).parents[2] / "examples" / "reasoning-gym"
PALINDROMES = {"dataset": "palindrome_generation", "config": {"min_length": 4, "max_length": 4}, "question": "letters: (.*)"}


def settings(**args: object) -> config.Environment:
    return config.Environment(name="gym", entry="slipstream.environments.reasoning_gym:ReasoningGym", args=args)


def started(**args: object) -> ReasoningGym:
    environment = ReasoningGym(**args)  # type: ignore[arg-type]
    environment.start()
    return environment


async def test_the_same_task_is_the_same_question_and_others_differ():
    """A task's index and seed are all its randomness; without a size there is an entry for every task."""
    async with connect(settings(dataset="chain_sum")) as client:
        assert client.description.tasks == 0
        tasks = [Task(1, 5), Task(1, 5), Task(1, 6), Task(1 << 40, 5)]
        results = await client.reset([EpisodeReset(f"e{i}", task) for i, task in enumerate(tasks)])
        texts = [r.text for r in results if isinstance(r, Reset)]
        assert texts[0] == texts[1] and len({*texts}) == 3


def test_a_size_makes_numbered_tasks_from_the_seed():
    """As reasoning-gym numbers them: entry i of a dataset with that seed."""
    import reasoning_gym

    environment = started(dataset="chain_sum", size=20, seed=7)
    entries = reasoning_gym.create_dataset("chain_sum", seed=7)
    assert environment.tasks == 20
    found = [environment.reset(Task(i, 99)) for i in range(20)]
    assert [(r.text, r.answer) for r in found] == [(entries[i]["question"], entries[i]["answer"]) for i in range(20)]


def test_the_model_sees_the_part_that_the_expression_names():
    """The sentences around it never change; a small model is spared them."""
    reset = started(**PALINDROMES).reset(Task(0, 0))
    assert sorted(reset.text.split(", ")) == sorted(reset.answer)


def test_every_right_answer_counts_not_only_the_one_that_was_shown():
    """The dataset judges: any palindrome of the letters is right, other letters are not."""
    reset = started(**PALINDROMES).reset(Task(3, 1))
    other = reset.answer[1] + reset.answer[0] * 2 + reset.answer[1]
    assert other != reset.answer
    for said, points, solved in ((reset.answer, 1.0, 1.0), (f" {other}\n", 1.0, 1.0), ("abba", 0.05, 0.0), ("", 0.0, 0.0)):
        assert score("", said, "", reset.info) == {"scalar": points, "components": {"solved": solved}}


def test_with_a_tag_only_what_it_encloses_is_judged():
    """Thoughts before the answer are free; a response without the tag has no answer. The warm-up sees the form."""
    reset = started(dataset="chain_sum", answer_tag="answer").reset(Task(0, 0))
    right = reset.answer.removeprefix("<answer>").removesuffix("</answer>")
    assert reset.answer == f"<answer>{right}</answer>"
    said = (f"well <answer>{right}9</answer> no, <answer> {right}\n</answer>.", right, f"<answer>{right}")
    assert [score("", text, "", reset.info)["scalar"] for text in said] == [1.0, 0.0, 0.0]


def test_a_system_message_makes_a_chat_of_the_question():
    """For models with a chat template."""
    reset = started(dataset="chain_sum", system="Be brief.").reset(Task(0, 0))
    assert [m["role"] for m in reset.messages or ()] == ["system", "user"]
    assert (reset.messages or ())[1]["content"].startswith("State the final answer")


@pytest.mark.parametrize(("args", "message"), [
    ({"dataset": "chain_sums"}, "did you mean 'chain_sum'"),
    ({"dataset": "chain_sum", "config": {"terms": 3}}, "unexpected keyword argument 'terms'"),
    ({"dataset": "chain_sum", "config": {"min_terms": 9}}, "max_terms must be >= min_terms"),
    ({"dataset": "chain_sum", "question": "letters: (.*)"}, "is not in a question of chain_sum"),
    ({"dataset": "chain_sum", "question": "letters"}, "has no group"),
    ({"dataset": "chain_sum", "question": "("}, "is no regular expression"),
    ({"dataset": "chain_sum", "size": -1}, "0 or more is needed"),
    ({"dataset": "word_ladder"}, "set args.size"),
])
async def test_what_does_not_fit_is_said_at_start(args, message):
    """Field, value and remedy, before the first episode."""
    with pytest.raises(ConfigError, match=message):
        await describe(settings(**args))


async def test_what_the_scorer_raises_is_a_failure_with_a_reason():
    """Judged in a process of its own: a broken sample fails alone, and its neighbour is scored."""
    reset = started(dataset="chain_sum").reset(Task(0, 0))
    broken = reset.info | {"dataset": "gone"}
    async with Sandbox(1, 20) as sandbox:
        right, wrong = await Scorers(sandbox).score_all([
            Transcript(scorer=ReasoningGym.scorer, response=reset.answer, info_json=json.dumps(info))
            for info in (reset.info, broken)])
    assert (right.scalar, dict(right.components), right.failure) == (1.0, {"solved": 1.0}, "")
    assert wrong.scalar == 0 and wrong.failure.startswith("exception: ConfigError: environments.args.dataset = 'gone'")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda p: p.stem)
async def test_the_examples_alphabet_and_context_hold_their_tasks(path):
    """A hundred questions and answers each."""
    run = config.load(path)
    assert run.run.name == path.stem and run.model.build is not None
    async with connect(run.environments[0]) as client:
        results = await client.reset([EpisodeReset(f"e{i}", Task(i, i)) for i in range(100)])
    for reset in results:
        assert isinstance(reset, Reset) and reset.text is not None
        assert {*reset.text, *reset.answer} <= {*run.model.build.tokenizer_chars}
        assert len(reset.answer) < run.rollout.max_new_tokens
        assert len(reset.text) + run.rollout.max_new_tokens <= run.rollout.context
