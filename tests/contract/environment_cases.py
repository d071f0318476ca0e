"""Environments of users, good and bad, that the contract suite runs in process and over gRPC."""

import asyncio
import threading
from typing import ClassVar

from slipstream.environment import Action, Environment, Episode, Observation, Reset, Step, Task


class Guess(Environment):
    """Multi-turn, with state and rewards of its own: guess a digit, three turns at most."""

    tasks = 100
    acted: ClassVar[list[str]] = []  # one entry per real act

    def reset(self, task: Task) -> Reset:
        self.acted.append("reset")
        return Reset(
            f"guess {task.index}?", answer=str(task.random.randrange(10)), info={"index": task.index}, state={"tried": []})

    def step(self, episode: Episode, action: Action) -> Step:
        self.acted.append(f"step {episode.turn}")
        tried = episode.state["tried"]
        tried.append(action.text)
        if action.text == episode.reset.answer or episode.turn == 3:
            right = action.text == episode.reset.answer
            return Step(done=True, reward=float(right), components={"turns": float(len(tried))})
        return Step(Observation(f"not {', '.join(tried)}"), reward=0.0)


class AsyncGuess(Guess):
    """The same with async methods."""

    async def reset(self, task: Task) -> Reset:  # type: ignore[override]
        await asyncio.sleep(0)
        return Guess.reset(self, task)

    async def step(self, episode: Episode, action: Action) -> Step:  # type: ignore[override]
        await asyncio.sleep(0)
        return Guess.step(self, episode, action)


class Broken(Environment):
    """Each task index fails in its own way."""

    scorer = "exact"
    max_episodes = 20
    hang = threading.Event()  # tests set it, so that no thread outlives them

    def reset(self, task: Task):
        match task.index:
            case 1:
                return 1 / 0
            case 2:
                return 42
            case 3:
                return Reset(answer="no observation")
            case 4:
                self.hang.wait(30)
            case 5:
                return Reset("x", answer=3)  # type: ignore[arg-type]
            case 7:
                return Reset("x", state=3)  # type: ignore[arg-type]
        return f"task {task.index}"

    def step(self, episode: Episode, action: Action):
        match action.text:
            case "raise":
                raise KeyError("lost")
            case "nan":
                return Step(done=True, reward=float("nan"))
            case "nothing":
                return Step()
        return Step(done=True)


class Forms(Environment):
    """Observations in all three forms."""

    scorer = "numeric"

    def reset(self, task: Task) -> Observation:
        match task.index:
            case 0:
                return Observation(messages=[{"role": "user", "content": "2+2?"}])
            case 1:
                return Observation(tokens=[3, 1, 4])
        return Reset("text", answer="4", scorer="exact", info={"why": ["because"]})
