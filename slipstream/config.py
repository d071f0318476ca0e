"""The run file: one owner, one default and one sentence for each setting.

A run file is TOML. `load()` reads it, applies `--set a.b=c` overrides, refuses unknown keys with the nearest known name and
contradictions with both fields, and returns a frozen `RunFile`. Whoever needs a setting takes it from there; nothing else
reads a file or the environment.

Example:
    run = load("examples/sort-digits/run.toml", ["schedule.max_lag=0"])
    run.trainer.learning_rate
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from slipstream.config_ranks import runs_on_many
from slipstream.config_sections import (
    Buffer,
    Environment,
    Model,
    Objects,
    Reward,
    Rollout,
    Run,
    Schedule,
    Section,
    Service,
    Tracing,
)
from slipstream.config_sections import Build as Build  # part of a model table, used by name elsewhere
from slipstream.config_security import Security
from slipstream.config_training import Alarms, Algorithm, Critic, Supervised, Trainer
from slipstream.config_training import Parallel as Parallel
from slipstream.errors import ConfigError


class RunFile(Section):
    """A whole run file. Sections are documented one by one."""

    run: Run
    model: Model
    environments: tuple[Environment, ...] = Field(default=(), description="Where tasks come from; only [sft] needs none.")
    schedule: Schedule = Schedule()
    algorithm: Algorithm = Algorithm()
    critic: Critic = Critic()
    trainer: Trainer = Trainer()
    sft: Supervised | None = None
    alarms: Alarms = Alarms()
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    buffer: Buffer = Buffer()
    objects: Objects = Objects()
    service: Service = Service()
    security: Security = Security()
    tracing: Tracing = Tracing()

    @model_validator(mode="after")
    def _consistent(self) -> RunFile:
        schedule, trainer, rollout = self.schedule, self.trainer, self.rollout
        if not self.environments and self.sft is None:
            raise ValueError("environments is missing: a run takes its tasks from at least one; set [[environments]]")
        if trainer.publish_every > schedule.max_lag + 1:
            raise ValueError(
                f"trainer.publish_every = {trainer.publish_every} exceeds schedule.max_lag + 1 = {schedule.max_lag + 1}: "
                "no batch could ever be fresh enough; lower the one or raise the other"
            )
        if schedule.mode == "pinned" and trainer.publish_every != 1:
            raise ValueError("schedule.mode = pinned needs trainer.publish_every = 1: every step names its version")
        if rollout.temperature != 1.0:
            raise ValueError(
                f"rollout.temperature = {rollout.temperature}: training needs 1, or the sampler's distribution is not the "
                "trainer's; remove the setting"
            )
        self._pinned_is_free_of_chance()
        self._adapter_has_a_base()
        if 0 < schedule.group_timeout_s <= schedule.sample_timeout_s:
            raise ValueError(
                f"schedule.sample_timeout_s = {schedule.sample_timeout_s:g} is not below schedule.group_timeout_s = "
                f"{schedule.group_timeout_s:g}: the whole group would be dropped first; lower the one or remove the other"
            )
        self._critic_has_a_use()
        if schedule.group_size < 2 and self.algorithm.advantage not in ("gae", "none"):
            raise ValueError(
                f"schedule.group_size = {schedule.group_size} with algorithm.advantage = {self.algorithm.advantage}: samples "
                "of a group are compared with each other, so at least 2 are needed"
            )
        if rollout.heartbeat_s >= rollout.lease_s:
            raise ValueError(
                f"rollout.heartbeat_s = {rollout.heartbeat_s:g} is not below rollout.lease_s = {rollout.lease_s:g}: every "
                "lease would lapse; a quarter of it is a good value"
            )
        if self.algorithm.route_replay == "sampler" and not rollout.capture_routes:
            raise ValueError(
                "algorithm.route_replay = sampler with rollout.capture_routes = false: there would be nothing to replay; set "
                "the latter to true, or route_replay = auto")
        self._compiled_may_differ()
        self._mini_steps_have_a_use()
        self._shared_is_one_machine()
        runs_on_many(self)
        self._guesses_can_be_judged()
        names = [e.name for e in self.environments]
        if duplicate := next((n for n in names if names.count(n) > 1), None):
            raise ValueError(f"environments: the name {duplicate!r} appears twice")
        need = (trainer.checkpoint_every + schedule.max_lag + 1) * self.batch_bytes_estimate
        if self.buffer.quota_bytes < need:
            raise ValueError(
                f"buffer.quota_bytes = {self.buffer.quota_bytes} is less than "
                f"(trainer.checkpoint_every + schedule.max_lag + 1) batches "
                f" of about {self.batch_bytes_estimate} bytes = {need}: raise it or checkpoint more often"
            )
        return self

    def _compiled_may_differ(self) -> None:
        """Raise when something is to be compiled that has no use for it, or may not change by a bit."""
        if self.rollout.compile in ("auto", "none"):
            return
        asked = f"rollout.compile = {self.rollout.compile}"
        if self.rollout.engine != "torch":
            raise ValueError(f"{asked} with rollout.engine = {self.rollout.engine}: it is the torch engine's; remove it")
        if self.deterministic:
            raise ValueError(
                f"{asked} and deterministic decoding (schedule.deterministic, or pinned) contradict: compiled kernels "
                "differ in the last bit with the pass they run in; remove one of them")

    def _mini_steps_have_a_use(self) -> None:
        """Raise when a batch cannot be split as asked, or when routes are to be kept that nothing would move."""
        trainer, replay = self.trainer, self.algorithm.route_replay
        if self.sft is not None and not self.environments and trainer.mini_steps > 1:
            raise ValueError(
                f"trainer.minibatches = {trainer.minibatches} and trainer.epochs = {trainer.epochs} with [sft] and no "
                "environments: they split batches of reinforcement learning; set sft.rows and sft.epochs instead")
        if trainer.minibatches > self.schedule.groups_per_batch:
            raise ValueError(
                f"trainer.minibatches = {trainer.minibatches} exceeds schedule.groups_per_batch = "
                f"{self.schedule.groups_per_batch}: mini-batches are of whole groups; lower it, or set trainer.epochs")
        if replay == "trainer" and trainer.mini_steps == 1:
            raise ValueError(
                "algorithm.route_replay = trainer with trainer.minibatches = 1 and trainer.epochs = 1: with one optimizer step "
                "per batch the earlier pass is that step's own; set one of them to 2 or more, or route_replay = auto")
        if replay == "trainer" and self.rollout.capture_routes:
            raise ValueError(
                "algorithm.route_replay = trainer with rollout.capture_routes = true: routes would be recorded and sent, and "
                "never used; set route_replay = auto, which replays them in every mini-step, or capture_routes = false")

    def _shared_is_one_machine(self) -> None:
        """Raise for what cannot take turns on the devices of one machine."""
        if self.run.placement == "split":
            return
        host, vllm = self.service.buffer_address.rpartition(":")[0].strip("[]"), self.rollout.vllm
        refused = {
            "rollout.workers = 0": (self.rollout.workers == 0, "workers elsewhere have devices of their own"),
            f"rollout.vllm.data_parallel_local = {vllm.data_parallel_local}": (
                self.rollout.engine == "vllm" and vllm.nodes > 1, f"the engine has {vllm.nodes} nodes"),
            f"service.buffer_address = {self.service.buffer_address}": (
                host not in ("", "127.0.0.1", "::1", "localhost"), "workers of other machines may join there"),
            "trainer.parallel.exchange = deep_ep": (
                self.trainer.parallel.exchange == "deep_ep", "its buffers stay on the devices"),
        }
        for setting, (holds, why) in refused.items():
            if holds:
                raise ValueError(
                    f"{setting} with run.placement = shared: {why}, and devices are shared on one machine; change it, or set "
                    "placement = split")

    def _guesses_can_be_judged(self) -> None:
        """Raise for what cannot run with speculation, or would not sample from the policy."""
        rollout, guess = self.rollout, f"rollout.speculation.method = {self.rollout.speculation.method}"
        if rollout.speculation.method == "off":
            return
        if rollout.engine != "vllm":
            raise ValueError(
                f"{guess} with rollout.engine = {rollout.engine}: only vLLM judges guessed tokens; set rollout.engine = vllm, "
                "or method = off")
        if self.deterministic:
            raise ValueError(
                f"{guess} with schedule.deterministic, which pinned schedules set: how many draws a token takes depends on "
                "what was guessed; set method = off and rollout.engine = torch, or schedule.deterministic = false")
        if min_p := rollout.vllm.sampling.get("min_p"):
            raise ValueError(
                f"{guess} with rollout.vllm.sampling.min_p = {min_p:g}: vLLM refuses every request of the two; remove one")

    def _critic_has_a_use(self) -> None:
        """Raise when there are settings of a critic but none, or when one makes settings of groups meaningless."""
        other = next((name for name, value in self.critic if value != getattr(Critic(), name)), None)
        if other and self.algorithm.advantage != "gae":
            raise ValueError(
                f"critic.{other} = {getattr(self.critic, other)} with algorithm.advantage = {self.algorithm.advantage}: there "
                "is no critic; remove the table, or set algorithm.advantage = gae")
        algorithm = self.algorithm
        uses = {"algorithm.teacher: a teacher teaches on": algorithm.teacher,
                "algorithm.advantage = gae: a critic learns from": algorithm.advantage == "gae",
                f"algorithm.credit = {algorithm.credit}: turns may differ in": algorithm.credit != "sample"}
        if self.schedule.resample_no_signal and (why := next((why for why, holds in uses.items() if holds), "")):
            raise ValueError(
                f"schedule.resample_no_signal = {self.schedule.resample_no_signal} with {why} groups with equal rewards, too; "
                "remove the former")

    def _pinned_is_free_of_chance(self) -> None:
        """Raise when a setting would make the batches of a pinned schedule depend on time or on rewards."""
        if not self.schedule.pinned:
            return
        clock, order = "a wall-clock deadline changes batches", "a draw out of turn moves all later ones"
        why = {"group_timeout_s": clock, "sample_timeout_s": clock, "max_requeues": order, "resample_no_signal": order}
        for name, reason in why.items():
            if value := getattr(self.schedule, name):
                raise ValueError(f"schedule.{name} = {value:g} and a pinned schedule contradict: {reason}; remove one of them")

    def _adapter_has_a_base(self) -> None:
        """Raise when something needs the weights of step 0, which an adapter run does not have in one piece."""
        if self.model.lora is None:
            return
        if self.algorithm.kl != "none" and not self.algorithm.reference and self.trainer.warmup.steps:
            raise ValueError(
                f"trainer.warmup.steps = {self.trainer.warmup.steps} with model.lora and algorithm.kl = {self.algorithm.kl}: "
                "the reference would be the base, as before the warm-up; set algorithm.reference, or warmup.steps = 0")
        targets, slots = self.model.lora.targets, self.rollout.vllm.adapters == "slots"
        if self.rollout.engine == "vllm" and slots and "experts" in targets:
            raise ValueError(
                f"model.lora.targets = {list(targets)} with rollout.vllm.adapters = slots: experts are adapted in the weights "
                'only; set adapters = "merged", or remove "experts" from targets')
        if self.rollout.engine == "vllm" and not slots and self.model.dtype == "bfloat16" and targets != ("experts",):
            raise ValueError(
                f"model.lora.targets = {list(targets)} in bfloat16 with rollout.vllm.adapters = merged: early updates of "
                "attention, added to the weights, are rounded away, and nothing would seem learnt; set adapters = \"slots\" "
                'and no experts, targets = ["experts"], model.dtype = "float32", or rollout.engine = "torch"')
        if self.algorithm.advantage == "gae":
            raise ValueError(
                "model.lora with algorithm.advantage = gae: the critic is a second model, trained whole, which an adapter is "
                "there to avoid; set another algorithm.advantage, such as grpo")

    @property
    def batch_bytes_estimate(self) -> int:
        """Bytes of one batch's bodies by the first estimate."""
        return (
            self.schedule.groups_per_batch
            * self.schedule.group_size
            * min(self.buffer.sample_bytes, 64 + 16 * self.rollout.context)
        )

    @property
    def deterministic(self) -> bool:
        return self.schedule.pinned if self.schedule.deterministic is None else self.schedule.deterministic

    @property
    def folder(self) -> Path:
        return Path(self.run.folder or f"runs/{self.run.name}").resolve()

    @property
    def objects_url(self) -> str:
        return self.objects.url or f"file://{self.folder / 'objects'}"

    @property
    def hash(self) -> str:
        """SHA-256 of the settings that workers must agree on: all but the folder, process counts, ranks and the run's end.

        Only of those that differ from their default: a setting that a later release adds, and nobody set, changes nothing, so
        services of two releases agree on one run file. `tools/check_release.py` sees to it that defaults stay as they are.
        """
        data = self.model_dump(mode="json", exclude_defaults=True)
        apart = {"run": ("folder", "steps", "target_reward"), "rollout": ("workers", "python"), "reward": ("workers",),
                 "objects": ("near",), "trainer": ("parallel",)}
        for section, names in apart.items():
            kept = {name: value for name, value in data.pop(section, {}).items() if name not in names}
            data |= {section: kept} if kept else {}
        for section in ("service", "security", "tracing"):
            data.pop(section, None)
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read a run file. Raises ConfigError with one line that names field, value and remedy."""
    path = Path(path)
    try:
        text = path.read_text()
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"run file {path} does not exist; examples/sort-digits/run.toml is one to copy") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"run file {path} cannot be read: {error}") from None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"run file {path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
    for override in overrides:
        _apply(data, override)
    return parse(data, str(path))


def parse(data: dict[str, Any], source: str = "run file") -> RunFile:
    """Validate the tables of a run file. Raises ConfigError."""
    try:
        return RunFile.model_validate(data)
    except ValidationError as error:
        found = [_explain(source, e) for e in error.errors()]
        refusal = ConfigError("; ".join(found))
        for sentence in found:  # for whoever has a line for each
            refusal.add_note(sentence)
        raise refusal from None


def json_schema() -> dict[str, Any]:
    """JSON Schema of a run file, for editors."""
    return RunFile.model_json_schema()


def settings() -> Iterator[tuple[str, str, str]]:
    """Every setting as (dotted name, default, sentence), for --help and the reference."""
    yield from _settings(RunFile, "")


def _settings(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in section.model_fields.items():
        if inner := _section_of(field.annotation):
            yield from _settings(inner, f"{prefix}{name}.")
        else:
            default = "required" if field.is_required() else json.dumps(field.get_default(call_default_factory=True))
            yield f"{prefix}{name}", default, field.description or ""


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The table behind an annotation: Section, Section | None or tuple[Section, ...]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (tuple, types.UnionType, typing.Union):
        return next((s for a in typing.get_args(annotation) if (s := _section_of(a))), None)
    return None


def _apply(data: dict[str, Any], override: str) -> None:
    """One `a.b=value`; the value is TOML, null for none, or a bare string. `environments.0.name` indexes a list."""
    name, equals, text = override.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set {override!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = None if text.strip() == "null" else text
    *path, key = name.strip().split(".")
    table: Any = data
    for part in path:
        if isinstance(table, list):
            if not part.isdigit() or int(part) >= len(table):
                raise ConfigError(f"--set {override!r}: {part!r} is not an index of a list of {len(table)}")
            table = table[int(part)]
        elif isinstance(table, dict):
            table = table.setdefault(part, {})
    if not isinstance(table, dict):
        raise ConfigError(f"--set {override!r}: {'.'.join(path)} is a value, not a table")
    table[key] = value


def _explain(source: str, error: Any) -> str:
    """One validation error as a sentence with field, value and remedy."""
    place = ".".join(str(p) for p in error["loc"])
    section: type[BaseModel] = RunFile
    for part in error["loc"][:-1]:
        if isinstance(part, str) and part in section.model_fields:
            section = _section_of(section.model_fields[part].annotation) or section
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(error["loc"][-1]), section.model_fields, n=1, cutoff=0.5)
        known = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(section.model_fields)}"
        return f"{source}: unknown key {place}; {known}"
    if error["type"] == "missing" and isinstance(error["loc"][-1], int):
        return (f"{source}: {place.rpartition('.')[0]} = {error['input']!r}: it has too few values; "
                "see docs/reference/settings.md for how many")
    if error["type"] == "missing":
        return f"{source}: {place} is missing; set it"
    if error["type"] == "value_error":
        return f"{source}: {place + ': ' if place else ''}{error['ctx']['error']}"
    field = section.model_fields.get(str(error["loc"][-1])) if error["loc"] else None
    said = error["msg"].replace("Input should", "it should", 1)
    if error["type"] == "model_type":
        said = "it should be a table"
    elif error["type"] == "string_pattern_mismatch":
        said = "it may not be that"  # what may be, its sentence says in words
    elif error["type"] == "string_type" and isinstance(error["input"], int | float):
        quoted = json.dumps(str(error["input"]))
        said += f"; in quotes it is one: {error['loc'][-1]} = {quoted}, or --set {place}='{quoted}'"
    meant = f". It is: {field.description}" if field and field.description else ""
    return f"{source}: {place} = {error['input']!r}: {said}{meant}"
