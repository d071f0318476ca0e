"""The environment SDK: write an environment in ten lines, serve it, talk to it.

    from slipstream.environment import Environment, Reset, Task

    class Reverse(Environment):
        scorer = "exact"

        def reset(self, task: Task) -> Reset:
            word = "".join(task.random.choices("abc", k=4))
            return Reset(word + "=", answer=word[::-1])

One object serves all episodes; what belongs to one episode goes into `Reset(state=...)` and is `episode.state` in `step`.
Methods may be `async`. Plain ones run in threads, several episodes at once, unless the class promises with `inline = True`
that they return within microseconds. docs/guides/environments.md tells all of it.

    serve(Reverse(), port=50061)                  # in one process:  slipstream env serve my_env:Reverse --port 50061
    async with connect(settings) as client:       # in another; `settings` is a table of [[environments]] in the run file
        [reset] = await client.reset([EpisodeReset("e1", Task(index=0, seed=7))])
        [step] = await client.step([EpisodeStep("e1", 1, Action("abba"))])

Failures of one episode are values in the list, never exceptions of the whole call.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import random
import sys
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slipstream import config, seeds
from slipstream.errors import ConfigError
from slipstream.protos.types.v1 import sample_pb2

if TYPE_CHECKING:
    from slipstream.auth_credentials import Credentials
    from slipstream.environments.client import EnvironmentClient
    from slipstream.lifecycle import Clock, Waits

FINISH_STOP = sample_pb2.FINISH_REASON_STOP
FINISH_LENGTH = sample_pb2.FINISH_REASON_LENGTH
MOST_NAMES = 12  # in an error message


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. `index` counts within the environment; `seed` is all the randomness a procedural one may use."""

    index: int
    seed: int
    environment: str = ""

    @property
    def random(self) -> random.Random:
        """A fresh generator: the same numbers for the same task, wherever and however often it is reset."""
        return random.Random(seeds.stream(self.seed, "environment", self.index))


@dataclass(slots=True)
class Observation:
    """What the model sees next, in exactly one of three forms.

    text: appended to the tokens as it is. messages: [{"role": "user", "content": "2+2?"}], rendered through the model's chat
    template. tokens: ids, appended as they are. Raises ValueError unless exactly one is given.

    `conversation` names what it is appended to. A new name begins a conversation with nothing in its context (to go on from a
    summary), or, with `fork_of`, with all that the other one holds by now (a sub-agent). Every answer is trained in the
    conversation that it was given in, and nowhere else.
    """

    text: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    tokens: Sequence[int] | None = None
    conversation: str = field(default="", kw_only=True)
    fork_of: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.text, str) and self.messages is None and self.tokens is None:
            return
        given = [name for name in ("text", "messages", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"an observation is exactly one of text, messages and tokens; given: {', '.join(given) or 'none'}")
        if self.text is not None:
            raise ValueError(f"text = {self.text!r} is a {type(self.text).__name__}, not a str")
        for i, message in enumerate(self.messages or ()):
            if not (isinstance(message, Mapping) and {"role", "content"} <= message.keys()
                    and all(isinstance(v, str) for v in (message["role"], message["content"]))):
                raise ValueError(f'messages[{i}] = {message!r} is not of the form {{"role": "user", "content": "..."}}')


@dataclass(slots=True)
class Reset(Observation):
    """First observation of an episode, and what the scorer needs: the right answer, who scores, a JSON object.

    `state` is what `episode.state` begins with: it stays with the environment, nobody else sees it.
    """

    answer: str = ""
    scorer: str = ""  # empty = the environment's
    info: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict, kw_only=True)


@dataclass(slots=True)
class Action:
    """What the model said: text without special tokens, the token ids, and why it stopped (FINISH_STOP or FINISH_LENGTH)."""

    text: str
    tokens: Sequence[int] = ()
    finish_reason: int = FINISH_STOP


@dataclass(slots=True)
class Step:
    """Answer to an action. `reward` values this turn; None leaves it to the scorer. `done` ends the episode."""

    observation: Observation | str | None = None  # a str is text
    done: bool = False
    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Episode:
    """One running episode: its task, what reset returned, the number of this turn (1-based), and your own state, which begins
    as `Reset.state`."""

    id: str
    task: Task
    reset: Reset
    turn: int = 0
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpisodeReset:
    """Start an episode. `episode` is chosen by the caller, unique per attempt."""

    episode: str
    task: Task


@dataclass(frozen=True, slots=True)
class EpisodeStep:
    """Answer turn `sequence` (1 for the first action, then +1 each) of an episode."""

    episode: str
    sequence: int
    action: Action


@dataclass(frozen=True, slots=True)
class Description:
    """What an environment offers. tasks: 0 = one for every index. scorer: empty = it gives rewards itself."""

    name: str
    tasks: int = 0
    scorer: str = ""
    max_episodes: int = 0


class Environment:
    """Subclass it, write `reset`, and `step` if there is more than one turn. Class attributes may be set per object too."""

    tasks: int = 0  # number of tasks; 0 = procedural, a task for every index
    scorer: str = ""  # exact, numeric, regex or "module:function"; empty = `step` gives the reward
    max_episodes: int = 0  # most episodes at once; 0 = no limit
    truncated_is_wrong: bool = False  # an answer cut off by the token limit gets reward 0 without being scored
    inline: ClassVar[bool] = False  # methods return within microseconds: call them without a thread

    def start(self) -> Awaitable[None] | None:
        """Called once before the first episode: open files, count tasks."""

    def reset(self, task: Task) -> Observation | str | Awaitable[Observation | str]:
        """The first observation of `task`. Return a Reset to name the answer."""
        raise NotImplementedError

    def step(self, episode: Episode, action: Action) -> Step | Awaitable[Step]:
        """Answer an action. By default the episode is over after one, and the scorer judges it."""
        if self.truncated_is_wrong and action.finish_reason == FINISH_LENGTH:
            return Step(done=True, reward=0.0, components={"truncated": 1.0})
        return Step(done=True)


def load(entry: str, args: Mapping[str, Any] | None = None, setting: str = "environments.entry") -> Environment:
    """The environment behind "module:Class", constructed with `args`. The current folder is importable.

    Raises ConfigError that names `setting`, the module, class or argument, and the nearest known name.
    """
    kind = named(entry, setting)
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise ConfigError(f"{setting} = {entry!r}: it is not a subclass of slipstream.environment.Environment")
    known = [p.name for p in inspect.signature(kind).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    try:
        inspect.signature(kind).bind(**(args or {}))
    except TypeError as error:
        unknown = next((a for a in args or {} if a not in known), None)
        hint = f"; known: {', '.join(known) or 'none'}" if unknown is None else f"; {nearest(unknown, known)}"
        raise ConfigError(f"environments.args of {entry}: {error}{hint}") from None
    return kind(**(args or {}))


def named(entry: str, setting: str) -> Any:
    """What "module:name" points to. Raises ConfigError with the nearest known name."""
    module_name, colon, name = entry.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f'{setting} = {entry!r} is not of the form "module:name"')
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise ConfigError(f"{setting} = {entry!r}: {module_name} needs a module that is missing: {error.name}") from None
        raise ConfigError(
            f"{setting} = {entry!r}: no module {error.name!r} in {here} or the Python path; "
            "start from its folder or set PYTHONPATH") from None
    except Exception as error:
        raise ConfigError(f"{setting} = {entry!r}: importing {module_name} raised {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{setting} = {entry!r}: {module_name} has no {name!r}; {nearest(name, vars(module))}")
    return getattr(module, name)


def nearest(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """A hint for a wrong name: the nearest known one, or the first few."""
    names = [n for n in known if not n.startswith("_")]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    few = [*sorted(names)[:MOST_NAMES], *(["..."] if len(names) > MOST_NAMES else [])]
    return f"known: {', '.join(few) or 'none'}"


def connect(
    settings: config.Environment, waits: Waits | None = None, clock: Clock | None = None,
    credentials: Credentials | None = None,
) -> EnvironmentClient:
    """A client of the environment that the run file names: in this process for `entry`, over gRPC for `address`.

    An async context manager; entering it starts or describes the environment (ConfigError, one line, when that fails).
    While a server is down, calls wait for it, named in `waits`. With certificates in `credentials` the server has to show one
    of role `environment`, unless its settings say `insecure`.
    """
    from slipstream.environments import client  # after this module: the client is built from its types

    return client.open_client(settings, waits, clock, credentials)


async def describe(settings: config.Environment, credentials: Credentials | None = None) -> Description:
    """What the environment of the run file offers. Raises ConfigError when it cannot be loaded or reached."""
    async with connect(settings, credentials=credentials) as client:
        return client.description


def serve(
    environment: Environment, host: str = "127.0.0.1", port: int = 0, name: str = "", credentials: Credentials | None = None,
    health_port: int = 0, metrics_port: int = 0, insecure: bool = False, log_content: bool = False,
) -> None:
    """Serve an environment over gRPC until SIGTERM or Ctrl-C; prints the address. port 0 = a free one.

    A host that is not loopback needs certificates in `credentials`, or `insecure`: plaintext for everybody who reaches it
    (ConfigError without either). `log_content`: log lines quote what exceptions of your code say, as they do at a terminal.
    `health_port` and `metrics_port` (0 = none) serve health in plaintext, for probes, and Prometheus metrics.
    For a server inside a running event loop use slipstream.environments.server.EnvironmentServer.
    """
    from slipstream.environments import server  # after this module: the server is built from its types

    server.run(environment, host, port, name, credentials, health_port, metrics_port, insecure, log_content)
