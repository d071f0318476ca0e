"""The tables of a run file, one class each: every setting with its type, its default and its sentence. See config.py.

What a table says against itself is refused here; what two tables say against each other, in config.py.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """Base of every table of the run file: frozen, unknown keys refused, every number finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


PositiveInt = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class Run(Section):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$")] = Field(
        description="Id of the run; everything durable is keyed by it: 1 to 63 lower-case letters, digits, dots and hyphens, "
        "the first a letter or a digit."
    )
    folder: str = Field(default="", description="Local folder for logs, metrics and file:// objects; default runs/<name>.")
    seed: int = Field(default=0, ge=0, description="Root of every random stream of the run.")
    steps: PositiveInt = Field(default=100, description="Optimizer steps to train.")
    target_reward: float | None = Field(
        default=None,
        description="Stop early, with success, once the mean reward of ten steps reaches this; "
        "the run exits non-zero when it ends below.",
    )
    placement: Literal["split", "shared"] = Field(
        default="split", description="shared: trainer and rollout workers take turns on the same devices of one machine."
    )


class Build(Section):
    """A model built from a transformers configuration instead of loaded."""

    model_type: str = Field(description="transformers model type, such as qwen3_moe, mixtral or olmoe.")
    config: dict[str, Any] = Field(default_factory=dict, description="Arguments of that configuration class.")
    tokenizer_chars: str = Field(
        default="", description="Alphabet of a character-level tokenizer; one is built with this model."
    )


class Lora(Section):
    """Low-rank adapters: the base stays as it is, a policy version is the adapter alone. Needs the package peft."""

    rank: PositiveInt = Field(default=16, description="Rank of every adapter.")
    alpha: float = Field(default=32.0, gt=0, description="An adapter counts alpha / rank times.")
    targets: tuple[str, ...] = Field(
        default=("attention", "experts"), min_length=1,
        description="What is adapted: attention, experts, or ends of layer names, such as q_proj or down_proj."
    )
    save_merged: bool = Field(
        default=False, description="At the end also write model/merged, an ordinary model with the adapter added."
    )


class Model(Section):
    path: str = Field(default="", description="Hugging Face model directory, with config, weights and tokenizer.")
    gguf_file: str = Field(default="", description="Name of a GGUF file in `path` to load weights and tokenizer from.")
    build: Build | None = Field(default=None, description="Build a fresh model instead of loading `path`.")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Type of weights and activations.")
    experts: Literal["auto", "grouped_mm", "eager", "batched_mm"] = Field(
        default="auto", description="Expert kernel of transformers; auto = grouped_mm."
    )

    lora: Lora | None = Field(default=None, description="Train adapters instead of the weights.")

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if bool(self.path) == (self.build is not None):
            both = f"path = {self.path!r} beside a table [model.build]: a model is loaded or built; remove one of them"
            neither = "neither model.path nor [model.build] is set: name a Hugging Face directory in model.path"
            raise ValueError(both if self.path else neither)
        return self


class Environment(Section):
    name: str = Field(description="Name of the environment in tasks, metrics and logs.")
    entry: str = Field(default="", description='In-process Python environment as "module:Class".')
    address: str = Field(default="", description="host:port of an environment served over gRPC.")
    insecure: bool = Field(default=False, description="Allow plaintext to an address that is not loopback.")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the class behind `entry`.")
    weight: float = Field(default=1.0, gt=0, description="Share of draws in the mix of environments.")
    scorer: str = Field(
        default="", description='Scorer: exact, numeric, regex or "module:function"; empty = what the environment says.'
    )
    over_lag: Literal["wait", "mask", "drop"] = Field(
        default="wait", description="What happens to a group that would exceed schedule.max_lag."
    )
    max_turns: PositiveInt = Field(default=16, description="Model calls per episode before it is cut off.")
    step_timeout_s: Seconds = Field(default=60, description="Time limit of one Reset or Step call.")

    @model_validator(mode="after")
    def _one_source(self) -> Environment:
        if bool(self.entry) == bool(self.address):
            raise ValueError("set exactly one of entry and address")
        return self


class Schedule(Section):
    mode: Literal["free", "pinned"] = Field(
        default="free", description="pinned: batch k is draws [(k-1)B, kB), generated by step max(0, k-1-max_lag)."
    )
    max_lag: int = Field(default=2, ge=0, description="Bound on steps between sampling a token and training it.")
    groups_per_batch: PositiveInt = Field(default=64, description="Groups (draws) of one optimizer step, B.")
    group_size: PositiveInt = Field(default=8, description="Samples of one draw, compared with each other, G.")
    deterministic: bool | None = Field(
        default=None, description="Kernels whose results do not depend on batch mates; default: on when pinned."
    )
    group_timeout_s: float = Field(
        default=0, ge=0, description="Drop a group that is unfinished after this long, by name; 0 = never."
    )
    sample_timeout_s: float = Field(
        default=0, ge=0, description="Close a sample that is unfinished this long after its first grant; its group goes on "
        "without it; 0 = never."
    )
    max_attempts: PositiveInt = Field(default=8, description="Grants of one sample before it is closed as failed.")
    max_requeues: int = Field(
        default=0, ge=0, description="How often a task is drawn again when its group was dropped (failed, timeout or lag)."
    )
    resample_no_signal: int = Field(
        default=0, ge=0, description="Most groups with equal rewards that are dropped and replaced for one batch; others are "
        "in the batch, without weight."
    )

    @property
    def pinned(self) -> bool:
        return self.mode == "pinned" or self.max_lag == 0


class Vllm(Section):
    """The vLLM engine, rollout.engine = "vllm"; see docs/guides/engines.md."""

    kv_cache_bytes: int = Field(
        default=0, ge=0, description="Memory for keys and values; 0 = room for every slot on a CPU, what is left on a GPU."
    )
    block_size: int = Field(default=0, ge=0, description="Tokens of a cache block; 0 = 32 on a CPU, the engine's own on a GPU.")
    enforce_eager: bool | None = Field(default=None, description="Run without graphs and compilation; default: on a CPU.")
    tensor_parallel: PositiveInt = Field(default=1, description="Devices that share each layer's matrices.")
    data_parallel: PositiveInt = Field(default=1, description="Replicas of attention inside one engine.")
    data_parallel_local: int = Field(
        default=0, ge=0, description="Replicas on this node; 0 = all. Fewer make an engine of several nodes: its leader serves."
    )
    group_port: int = Field(default=29550, ge=1, lt=65536, description="Port of the leader where parts on other nodes meet it.")
    expert_parallel: bool = Field(default=False, description="Whole experts on each of tensor_parallel × data_parallel.")
    all2all: Literal[
        "", "allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency", "deepep_v2", "nixl_ep"
    ] = Field(default="", description="Token exchange of expert parallelism; empty = the engine's own choice.")
    fabric: Literal["nvlink", "infiniband", "efa", "efa-gda"] = Field(
        default="nvlink", description="What connects the devices: sets the variables that DeepEP and NCCL need there."
    )
    adapters: Literal["merged", "slots"] = Field(
        default="merged", description="model.lora: added to the weights at a swap, or beside them in a slot (no experts)."
    )
    sampling: dict[str, float] = Field(
        default_factory=dict, description="Further sampling parameters by vLLM's names, such as top_p; see biased_sampling."
    )
    biased_sampling: tuple[str, ...] = Field(
        default=(), description="Keys of `sampling` that are meant although the trainer cannot undo what they do."
    )
    engine_args: dict[str, Any] = Field(default_factory=dict, description="Further engine arguments by vLLM's names.")

    @model_validator(mode="after")
    def _consistent(self) -> Vllm:
        if biased := sorted(set(self.sampling) - set(self.biased_sampling)):
            raise ValueError(
                f"sampling.{biased[0]} = {self.sampling[biased[0]]:g} makes the sampler's distribution another than the "
                f"trainer's; remove it, or name it in biased_sampling = [{json.dumps(biased[0])}]")
        if self.all2all and not self.expert_parallel:
            raise ValueError(f"all2all = {self.all2all} with expert_parallel = false: no tokens are exchanged; set it to true")
        if self.data_parallel_local > self.data_parallel:
            raise ValueError(
                f"data_parallel_local = {self.data_parallel_local} exceeds data_parallel = {self.data_parallel}; lower it")
        if self.data_parallel_local and self.data_parallel % self.data_parallel_local:
            raise ValueError(
                f"data_parallel_local = {self.data_parallel_local} does not divide data_parallel = {self.data_parallel}: every "
                "node has the same share; choose a divisor")
        if self.nodes > 1 and self.adapters == "slots":
            raise ValueError(
                f"adapters = slots with an engine of {self.nodes} nodes: slots are loaded on the leader's node only; set "
                'adapters = "merged"')
        return self

    @property
    def nodes(self) -> int:
        """Nodes of one engine."""
        return self.data_parallel // (self.data_parallel_local or self.data_parallel)


class Speculation(Section):
    """Tokens guessed from the sequence itself and judged in one pass, rollout.engine = "vllm"; see docs/guides/engines.md."""

    method: Literal["off", "ngram", "suffix"] = Field(
        default="off", description="What guesses: nothing; what followed these tokens before: in the sequence, in all answers."
    )
    tokens: int = Field(default=4, ge=1, le=64, description="Most tokens guessed at once for one sequence.")
    prompt_lookup_min: PositiveInt = Field(default=2, description="Fewest last tokens that have to have come before; ngram.")
    prompt_lookup_max: PositiveInt = Field(default=4, description="Most last tokens that are looked for, longest first; ngram.")
    answers: int = Field(default=10_000, ge=0, description="Finished answers of this engine kept to guess from; suffix.")

    @model_validator(mode="after")
    def _consistent(self) -> Speculation:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min = {self.prompt_lookup_min} exceeds prompt_lookup_max = {self.prompt_lookup_max}; lower it")
        return self


class Rollout(Section):
    workers: int = Field(default=1, ge=0, description="Rollout workers that the local supervisor starts.")
    engine: Literal["torch", "vllm"] = Field(default="torch", description="Inference engine.")
    slots: PositiveInt = Field(default=256, description="Sequences decoded together; fixed batch width when deterministic.")
    context: PositiveInt = Field(default=512, description="Most tokens of prompt plus answer.")
    max_new_tokens: PositiveInt = Field(default=64, description="Most tokens of one model call.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature; training enforces 1.")
    capture_routes: bool = Field(default=False, description="Record the experts chosen for every token.")
    on_swap: Literal["keep", "recompute"] = Field(
        default="keep", description="What a weight swap does with the KV cache of sequences in flight."
    )
    canary: bool = Field(
        default=True, description="Prove at each load that the engine holds and uses what was published, or keep the old."
    )
    adaptive_slots: bool = Field(
        default=True, description="Hold fewer samples than slots while the engine's cache has no room for more; vllm only."
    )
    lease_s: Seconds = Field(default=60, description="Life of a lease without a heartbeat.")
    heartbeat_s: Seconds = Field(default=15, description="Interval of heartbeats.")
    threads: int = Field(default=1, ge=0, description="CPU threads of torch; 0 = all.")
    compile: Literal["auto", "none", "attention", "all"] = Field(
        default="auto", description="What of a decode pass is compiled, torch only: attention takes a second, all a minute "
        "or so (see docs/guides/engines.md); auto = attention where there is a C compiler."
    )
    python: str = Field(
        default="", description="Interpreter of rollout workers; empty = this, for vllm .venv-vllm/bin/python if it is there."
    )
    vllm: Vllm = Vllm()
    speculation: Speculation = Speculation()


class Reward(Section):
    workers: int = Field(default=1, ge=0, description="Reward workers that the local supervisor starts.")
    batch: PositiveInt = Field(default=512, description="Most samples of one scoring lease.")
    timeout_s: Seconds = Field(default=10, description="Time limit of one scorer call.")
    processes: int = Field(default=1, ge=0, description="Processes for module:function scorers, beside the service.")
    lease_s: Seconds = Field(default=60, description="Life of a scoring lease without a heartbeat.")


class Buffer(Section):
    redis: str = Field(default="", description="Redis URL; empty = the supervisor embeds a server on a unix socket.")
    redis_ca_file: str = Field(default="", description="PEM file of the authority of a rediss:// server; empty = the system's.")
    durability: Literal["always", "everysec", "memory"] = Field(
        default="always", description="What an acknowledgement has survived: fsync, the next second's fsync, nothing."
    )
    durability_check: Literal["warn", "require", "trust"] = Field(
        default="warn", description="What cannot be verified is said (warn) or refused (require); trust = nothing is asked."
    )
    quota_bytes: PositiveInt = Field(default=1 << 30, description="Most bytes of bodies held in Redis.")
    sample_bytes: PositiveInt = Field(default=65536, description="First estimate of a sample's size, for admission.")


class Near(Section):
    """Where rollout workers look for a policy version's bytes before the object store; see docs/guides/engines.md."""

    cache: str = Field(
        default="", description="Folder on a disk of the node that its workers share, for what they have read; empty = none."
    )
    cache_bytes: PositiveInt = Field(default=64 << 30, description="Most bytes in that folder; what is used least goes first.")
    server: str = Field(default="", description="host:port of a weight server (python -m services.weights); empty = none.")
    server_bytes: PositiveInt = Field(default=8 << 30, description="Most bytes that a weight server holds in memory.")
    peers: tuple[str, ...] = Field(
        default=(), description="host:port of the run's rollout workers, which serve versions to each other; a name stands for "
        "all of its addresses, looked up every 5 s. Empty = none.")
    peer_bytes: PositiveInt = Field(default=1 << 30, description="Most bytes that a worker keeps in memory for others.")

    @field_validator("peers")
    @classmethod
    def _addresses(cls, peers: tuple[str, ...]) -> tuple[str, ...]:
        for entry in peers:
            if not entry.rpartition(":")[0] or not entry.rpartition(":")[2].isdigit():
                raise ValueError(f"{entry!r} is not host:port: name the port of the workers' gRPC servers, such as 50051")
        return peers


class Objects(Section):
    url: str = Field(default="", description="file:///path or s3://bucket/prefix; default: objects/ in the run folder.")
    endpoint: str = Field(default="", description="Endpoint of an S3-compatible store.")
    region: str = Field(default="us-east-1", description="S3 region.")
    keep_versions: PositiveInt = Field(default=3, description="Newest policy versions kept beside those in use.")
    near: Near = Near()


class Tracing(Section):
    """OpenTelemetry traces of samples; see docs/guides/tracing.md. Needs the packages of slipstream[tracing]."""

    endpoint: str = Field(default="", description="host:port of a collector that takes OTLP over gRPC; empty = no traces.")
    sample_share: float = Field(default=0.01, ge=0, le=1, description="Share of the draws whose samples are traced.")
    ca_file: str = Field(
        default="", description="PEM file of the authority of the collector's certificate; empty = the system's, or plaintext "
        "on loopback.")
    insecure: bool = Field(default=False, description="Allow plaintext to a collector that is not on loopback.")

    @model_validator(mode="after")
    def _reachable(self) -> Tracing:
        if self.endpoint and not self.endpoint.rpartition(":")[2].isdigit():
            raise ValueError(f"endpoint = {self.endpoint!r} is not host:port; collectors listen on 4317 for OTLP over gRPC")
        return self


class Service(Section):
    buffer_address: str = Field(default="", description="host:port of the buffer; empty = the supervisor picks.")
    buffer_port: int = Field(default=0, ge=0, lt=65536, description="Port of the local buffer; 0 = a free one.")
    stall_s: Seconds = Field(default=300, description="No progress for this long is a state and an alert.")
    give_up_s: float = Field(
        default=900, ge=0, description="The local supervisor ends a run without progress for this long; 0 = never."
    )
    metrics: bool = Field(default=True, description="Serve Prometheus metrics from every process.")
    audit: bool = Field(
        default=False,
        description="Keep evidence for an auditor: each acknowledged sample in audit/<rollout worker>.jsonl, a count of each "
        "edge of the state machines in the ledger.",
    )
