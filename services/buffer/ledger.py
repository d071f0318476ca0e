"""The ledger: what was drawn, who works on it, what became of it. One Protocol, two implementations.

`RedisLedger` is the real one; `MemoryLedger` is the model that property tests compare it with. Neither knows gRPC. Every call
takes a whole list and answers in its order: a call is one Redis script, atomic and, in mode `always`, durable when it returns.

Order of a draw's life: grant_samples → submit_samples → grant_scoring → submit_scores → number_batch → read_batch → commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, NoReturn, Protocol

from slipstream import __version__
from slipstream.config import RunFile
from slipstream.errors import ConfigError, Fenced, InvalidInput, NotFound, OutOfRange, Unavailable
from slipstream.formats import NOTES

SCHEMA = 4  # of what is in Redis; a front serves this one alone, see refuse("schema") and refuse("overtaken")


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that decide transitions; taken from the run file once. Times in milliseconds."""

    run: str
    seed: int
    steps: int
    groups_per_batch: int
    group_size: int
    max_lag: int
    pinned: bool
    lease_ms: int
    scoring_lease_ms: int
    max_attempts: int
    group_timeout_ms: int
    quota_bytes: int
    sample_bytes: int
    keep_versions: int
    over_lag: Mapping[str, str]
    weights: Mapping[str, float]
    sample_timeout_ms: int = 0
    max_requeues: int = 0
    resample_no_signal: int = 0
    publish_every: int = 1
    edges: bool = False  # count every edge taken, as meta fields es:old>new and eg:old>new

    @classmethod
    def of(cls, run: RunFile) -> Rules:
        schedule = run.schedule
        return cls(
            run=run.run.name, seed=run.run.seed, steps=run.run.steps, groups_per_batch=schedule.groups_per_batch,
            group_size=schedule.group_size, max_lag=schedule.max_lag, pinned=schedule.pinned,
            lease_ms=int(run.rollout.lease_s * 1000), scoring_lease_ms=int(run.reward.lease_s * 1000),
            max_attempts=schedule.max_attempts, group_timeout_ms=int(schedule.group_timeout_s * 1000),
            quota_bytes=run.buffer.quota_bytes, sample_bytes=min(run.buffer.sample_bytes, 64 + 16 * run.rollout.context),
            keep_versions=run.objects.keep_versions, over_lag={e.name: e.over_lag for e in run.environments},
            weights={e.name: e.weight for e in run.environments}, edges=run.service.audit,
            sample_timeout_ms=int(schedule.sample_timeout_s * 1000), max_requeues=schedule.max_requeues,
            resample_no_signal=schedule.resample_no_signal, publish_every=run.trainer.publish_every)


class Lease(NamedTuple):
    """The right to work on one sample; `attempt` fences. Example: draw 401, sample 3, second grant = Lease(401, 3, 2)."""

    draw: int
    sample: int  # position in the group
    attempt: int
    epoch: int = 1


class Outcome(StrEnum):
    """What became of one item of a list."""

    ACCEPTED = "accepted"  # now, or by an earlier identical call
    OUTDATED = "outdated"  # the group was closed meanwhile; nothing changed
    FENCED = "fenced"  # a newer attempt exists, or the lease was given back
    CONFLICT = "conflict"  # the same attempt came with another body
    UNKNOWN = "unknown"  # never granted
    SPILL = "spill"  # the quota is full: put the body into the object store, submit its key


@dataclass(slots=True)  # one a sample: frozen, it would take three times as long to make
class Grant:
    lease: Lease
    environment: str
    task_index: int
    group_size: int
    min_step: int
    pinned_version: int  # publication number; 0 = free-running
    partial: bytes = b""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why nothing can be given. `why` names the case, `facts` its numbers; sentences.py makes the sentence."""

    why: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Granted:
    grants: Sequence[Grant]
    waiting: Waiting | None = None  # set when nothing was granted
    finished: bool = False  # every batch of the run is numbered


@dataclass(slots=True)  # one a sample: frozen, it would take three times as long to make
class Submit:
    """One finished sample. `steps` are the distinct (step, incarnation) pairs of its version spans."""

    lease: Lease
    body: bytes | memoryview
    crc32c: int
    tokens: int
    generated_tokens: int
    steps: Sequence[tuple[int, int]]
    transcript: bytes = b""
    score: bytes = b""  # serialized Score when the environment already gave the reward
    failure: str = ""
    reward: float = 0.0  # scalar of the score, as trained: 0 when the scorer failed
    bounded: bool = False  # answer SPILL rather than hold more bytes than the quota
    spilled: int = 0  # bytes of a body that is in the object store; `body` is its key then


@dataclass(frozen=True, slots=True)
class Partial:
    lease: Lease
    body: bytes
    steps: Sequence[tuple[int, int]]
    release: bool = False


@dataclass(slots=True)  # one a sample: frozen, it would take three times as long to make
class ScoringGrant:
    lease: Lease
    environment: str
    task_index: int
    transcript: bytes


@dataclass(slots=True)  # one a sample: frozen, it would take three times as long to make
class Scored:
    lease: Lease
    score: bytes  # serialized Score
    reward: float = 0.0  # its scalar, as trained: 0 when the scorer failed


@dataclass(frozen=True, slots=True)
class Version:
    number: int
    step: int
    incarnation: int
    manifest_key: str
    manifest_crc32c: int


@dataclass(frozen=True, slots=True)
class Published:
    """What follows from a publication. `deletable` versions are told in two answers each, so that a lost one is harmless."""

    deletable: Sequence[Version]
    versions: Sequence[Version]  # that may be loaded, newest first
    next_number: int  # reserved for the next version; 0 when nobody asked


@dataclass(frozen=True, slots=True)
class Incarnation:
    incarnation: int
    ledger_epoch: int
    numbered_batch: int
    committed_batch: int
    ledger_sequence: int


@dataclass(frozen=True, slots=True)
class Numbering:
    """Answer to number_batch: numbered (now or before), or why not yet."""

    numbered: bool
    waiting: Waiting | None = None
    checkpoint_now: bool = False
    finished: bool = False
    sequence: int = 0  # of the ledger when the batch was numbered, and the time; 0 = known from the batch log alone
    numbered_ms: int = 0


@dataclass(slots=True)  # one a sample: frozen, it would take three times as long to make
class Member:
    index: int
    body: bytes
    crc32c: int
    score: bytes
    oldest_step: int
    newest_step: int
    tokens: int
    generated_tokens: int
    spilled: int = 0  # as in Submit


@dataclass(frozen=True, slots=True)
class BatchedGroup:
    draw: int
    environment: str
    task_index: int
    group_size: int
    lag: int
    mask_below_step: int
    members: Sequence[Member]
    no_signal: bool = False  # all rewards equal: in the batch, but without weight in the loss


@dataclass(frozen=True, slots=True)
class Composition:
    """Everything of batch k that its log object needs."""

    batch: int
    ledger_epoch: int
    ledger_sequence: int
    groups: Sequence[BatchedGroup]
    drops: Sequence[tuple[int, str]]
    numbered_ms: int = 0
    next_draw: int = 0  # when it was numbered, like `live`: draws not yet terminal and in no batch
    live: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a lost or rewound ledger starts over with: known from the checkpoint, the batch log and the store."""

    seen_epoch: int  # epoch of the ledger that was found behind: nothing happens when another front was faster
    numbered: int  # newest batch of the log
    committed: int  # batch of the checkpoint
    next_draw: int
    version: int  # highest publication number in the store
    cursor: Mapping[str, int]
    epoch: int = 0  # the new epoch and sequence number are above these, and above the ledger's own
    sequence: int = 0
    versions: Sequence[Version] = ()  # published, still in the store, of steps up to the checkpoint
    lost_draws: Sequence[int] = ()  # known to have been alive: dropped(ledger lost) by name; others are only counted


@dataclass(frozen=True, slots=True)
class Balance:
    """Counters of both state machines and the queues. `check()` proves that they add up."""

    meta: Mapping[str, Any]
    samples: Mapping[str, int]
    groups: Mapping[str, int]
    dropped: Mapping[str, int]

    def check(self, group_size: int) -> None:
        draws = int(self.meta.get("next_draw", 0)) - int(self.meta.get("lost", 0))
        if sum(self.groups.values()) != draws or sum(self.samples.values()) != draws * group_size:
            raise AssertionError(f"the ledger does not add up: {draws} draws, groups {self.groups}, samples {self.samples}")


@dataclass(frozen=True, slots=True)
class Holders:
    """The balance with what only the records tell, at one moment. Leases by worker, lapsed ones included."""

    balance: Balance
    low_water_mark: int  # every draw below it is committed or dropped
    sample_leases: Mapping[str, int]
    scoring_leases: Mapping[str, int]


PARTIAL_BYTES = 32 << 20  # of partials in one answer of grant_samples, but for the last of them: an answer has to fit a message
TOPICS: tuple[str, ...] = ("samples", "unscored", "ready", "versions")
OnChange = Callable[[Sequence[str]], None]


class Ledger(Protocol):
    """See the module. Errors are SlipstreamErrors: Fenced, OutOfRange, NotFound, InvalidInput, Unavailable.

    When the store was emptied, the next call opens the ledger anew and raises Unavailable(LEDGER_EMPTY).
    """

    rules: Rules
    on_change: OnChange  # called with the topics (TOPICS) in which something became possible

    async def open(self, tasks: Mapping[str, int]) -> None: ...
    async def grant_samples(self, worker: str, count: int, loaded: int = 0) -> Granted: ...
    async def heartbeat_samples(self, leases: Sequence[Lease]) -> list[Outcome]: ...
    async def release_samples(self, leases: Sequence[Lease]) -> list[Outcome]: ...
    async def submit_samples(self, submits: Sequence[Submit]) -> list[Outcome]: ...
    async def submit_partials(self, partials: Sequence[Partial]) -> list[Outcome]: ...
    async def grant_scoring(self, worker: str, count: int) -> list[ScoringGrant]: ...
    async def heartbeat_scoring(self, leases: Sequence[Lease]) -> list[Outcome]: ...
    async def submit_scores(self, scores: Sequence[Scored]) -> list[Outcome]: ...
    async def take_incarnation(
        self, above: int, checkpoint_batch: int, checkpoint_epoch: int = 0, checkpoint_sequence: int = 0) -> Incarnation: ...
    async def number_batch(self, incarnation: int, batch: int) -> Numbering: ...
    async def read_batch(self, batch: int) -> Composition: ...
    async def commit(self, incarnation: int, through_batch: int) -> int: ...
    async def reserve_version(self, incarnation: int, step: int) -> int: ...
    async def publish_version(self, version: Version, next_step: int = 0) -> Published: ...
    async def hold_version(self, number: int, reader: str, ttl_ms: int) -> None: ...
    async def versions(self) -> list[Version]: ...
    async def sweep(self) -> None: ...
    async def grace(self) -> None: ...
    async def rebuild(self, plan: Rebuilt) -> None: ...
    async def balance(self) -> Balance: ...
    async def holders(self, leases: bool = True) -> Holders: ...  # False: leaves those out
    async def archive(self) -> list[dict[str, Any]]: ...
    async def trim(self, lines: Sequence[dict[str, Any]]) -> None: ...


def balance_of(meta: Mapping[str, Any], rules: Rules) -> Balance:
    """The counters of a ledger, by kind; adds `outstanding`."""
    def part(prefix: str) -> dict[str, int]:
        return {k.removeprefix(prefix): int(v) for k, v in meta.items() if k.startswith(prefix)}
    get = {k: int(v) for k, v in meta.items() if isinstance(v, int)}
    trained = min(max(get.get("published", -1), 0), get.get("numbered", 0))
    outstanding = get.get("next_draw", 0) - get.get("dropped", 0) - rules.groups_per_batch * trained
    return Balance({**meta, "outstanding": outstanding}, part("s:"), part("g:"), part("x:"))


def refuse(code: str, facts: Mapping[str, Any]) -> NoReturn:
    """Raise the error that a refusal code of a transition stands for."""
    if code == "unopened":
        raise Unavailable(
            f"the ledger of run {facts['run']} is empty: its Redis lost everything; it is opened anew, and rebuilt when the "
            "trainer starts again", "LEDGER_EMPTY", retry_s=0.5)
    if code == "fenced" and facts["given"] > facts["newest"]:
        raise Fenced(
            f"the ledger knows no incarnation above {facts['newest']}, but this is {facts['given']}: it was lost or rewound; "
            "start the trainer again, which rebuilds it", "LEDGER_BEHIND", incarnation=facts["given"], newest=facts["newest"])
    if code == "fenced":
        raise Fenced(
            f"incarnation {facts['given']} is not the newest, {facts['newest']}: another trainer has taken over; stop",
            "FENCED", incarnation=facts["given"], newest=facts["newest"])
    if code == "range" and facts["batch"] > facts["numbered"] + 1:
        raise Fenced(
            f"the ledger has numbered {facts['numbered']} batches and knows nothing of batch {facts['batch']}: it was lost or "
            "rewound; start the trainer again, which rebuilds it", "LEDGER_BEHIND", **facts)
    if code == "range":
        raise OutOfRange(
            f"batch {facts['batch']} must be above the committed {facts['committed']}, at most {facts['numbered'] + 1}",
            "BATCH_RANGE", **facts)
    if code == "fork":
        raise Fenced(
            f"the checkpoint is at batch {facts['checkpoint']} but batch {facts['committed']} is committed: resuming before "
            f"the last commit is a fork; restore the damaged checkpoint, or fork: slipstream fork {facts['run']}@"
            f"{facts['checkpoint']}", "FORK", **facts)
    if code == "behind":
        raise Fenced(
            f"the ledger at batch {facts['numbered']} (epoch {facts['epoch']}, sequence {facts['sequence']}) is behind the "
            f"checkpoint at batch {facts['checkpoint']}: it was lost or rewound", "LEDGER_BEHIND", **facts)
    if code == "unreserved":
        raise InvalidInput(
            f"version {facts['number']} of step {facts['step']} was not reserved by incarnation {facts['incarnation']}; "
            "call ReserveVersion first", "NOT_RESERVED", **facts)
    if code == "no_version":
        raise NotFound(f"version {facts['number']} is not kept; list the versions and take a newer one", "NO_VERSION", **facts)
    if code == "overtaken":
        raise Unavailable(
            f"the ledger of run {facts['run']} has schema {facts['found']} now, this front knows {facts['known']}: another "
            "release has taken it over, and this front ends; ask the others", "LEDGER_SCHEMA", retry_s=1, **facts)
    if code == "schema":
        newer = isinstance(facts["found"], int) and facts["found"] > facts["known"]
        raise ConfigError(
            f"the ledger of run {facts['run']} has schema {facts['found']}, release {__version__} knows {facts['known']}: " + (
                "a newer release wrote it, use that one" if newer else
                f"an older release wrote it, finish the run with that one or see {NOTES}"), "LEDGER_SCHEMA")
    if code == "shape":
        raise ConfigError(
            f"{facts['field']} = {facts['given']}, but run {facts['run']} was started with {facts['found']}: "
            "restore the setting or choose a new run.name")
    raise ValueError(f"unknown refusal {code}: {facts}")


def shape_of(rules: Rules) -> dict[str, int]:
    """Settings that a run keeps for ever: changing them would renumber draws."""
    return {
        "schedule.groups_per_batch": rules.groups_per_batch, "schedule.group_size": rules.group_size,
        "run.seed": rules.seed, "schedule.pinned": int(rules.pinned)}
