"""Every metric of every service, by name, once; and the endpoint that serves them.

Each service makes its own group on its own registry, so several services can live in one process of a test:
    registry = CollectorRegistry()
    metrics = telemetry.BufferMetrics(registry)
    metrics.open_draws.set(3)
    address = telemetry.serve(registry, port=0)

Names are slipstream_<service>_<what>_<unit>; labels are few and never an instance, a draw or a sample. prometheus_client adds
`_total` to counters.
"""

from __future__ import annotations

import platform
import re
import weakref
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server

import slipstream
from slipstream.rpc import check_port

_RPC_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_WORK_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


_OF_STEP = (
    ("gap_mean", "logprob_gap_mean", "Mean |trainer - sampler| log-probability over the tokens, in nats."),
    ("gap_max", "logprob_gap_max", "Greatest |trainer - sampler| log-probability, in nats."),
    ("gap_fresh_mean", "numeric_gap_mean", "The mean gap of tokens at lag 0: the implementations alone, in nats."),
    ("gap_fresh_max", "numeric_gap_max", "The greatest gap of tokens at lag 0, in nats."),
    ("gap_stale_mean", "staleness_gap_mean", "The mean gap of tokens above lag 0, in nats."),
    ("gap_stale_max", "staleness_gap_max", "The greatest gap of tokens above lag 0, in nats."),
    ("k3", "kl_estimate", "Estimated KL divergence of sampler and trainer, in nats."),
    ("ratio_max", "ratio_max", "Largest probability ratio, trainer over sampler."),
    ("ess", "ess", "Effective sample size of the ratios, as a share of the trained tokens."),
    ("mini_steps", "mini_steps", "Optimizer steps that the last batch took."),
    ("k3_last", "kl_estimate_last", "The KL estimate at the last of several optimizer steps on a batch, in nats."),
    ("clip_share_last", "clip_share_last", "Share of clipped tokens at the last of several optimizer steps on a batch."),
    ("route_flip_share", "route_flip_share",
     "Share of replayed choices of experts that the trainer's router would make otherwise."),
    ("expert_load_max", "expert_load_max", "Tokens of a layer's busiest expert over the mean, in the worst layer."),
    ("expert_load_mean", "expert_load_mean", "Tokens of a layer's busiest expert over the mean, mean of the layers."),
    ("dead_experts", "dead_experts", "Experts that got no token in the step, summed over layers."),
    ("balance_loss", "balance_loss", "The routers' load-balancing loss: experts per token is balance, experts is collapse."),
    ("router_z_loss", "router_z_loss", "The routers' z-loss."),
    ("value_loss", "value_loss", "Loss of the critic's last update."),
    ("explained_variance", "explained_variance", "Share of the variance of returns that the critic foresaw: 1 is all."),
    ("critic_grad_norm", "critic_grad_norm", "Gradient norm of the critic's last update before clipping."),
    ("value_clip_share", "value_clip_share", "Share of tokens whose value moved beyond critic.clip."),
    ("teacher_kl", "teacher_kl", "Mean log-probability under the sampler less that under the teacher, in nats."),
    ("groups_without_signal", "groups_without_signal", "Groups of the last batch whose rewards are all equal."),
)


Plain = TypeVar("Plain", Gauge, Counter)
_PLAIN: weakref.WeakKeyDictionary[CollectorRegistry, list[Gauge | Counter]] = weakref.WeakKeyDictionary()


class _Group:
    """Makes metrics with one prefix on one registry."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        self._registry, self._prefix = registry, f"slipstream_{prefix}" if prefix else "slipstream"

    def _plain(self, metric: Plain) -> Plain:
        """One that `figures` tells."""
        _PLAIN.setdefault(self._registry, []).append(metric)
        return metric

    def _gauge(self, name: str, sentence: str, *labels: str) -> Gauge:
        return self._plain(Gauge(f"{self._prefix}_{name}", sentence, labels, registry=self._registry))

    def _counter(self, name: str, sentence: str, *labels: str, known: tuple[str, ...] = ()) -> Counter:
        """`known` values of the one label are there at 0 from the start: `increase` does not see a series' first value."""
        counter = self._plain(Counter(f"{self._prefix}_{name}", sentence, labels, registry=self._registry))
        for value in known:
            counter.labels(value)
        return counter

    def _histogram(self, name: str, sentence: str, *labels: str, buckets: tuple[float, ...] = _WORK_S) -> Histogram:
        return Histogram(f"{self._prefix}_{name}", sentence, labels, buckets=buckets, registry=self._registry)


class ProcessMetrics(_Group):
    """What every process has."""

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        super().__init__(registry, "")
        ProcessCollector(registry=registry)  # process_cpu_seconds_total, process_resident_memory_bytes, ...
        self.waiting_seconds = self._gauge("waiting_seconds", "How long the process has waited for this, now.", "for_")
        self.stalled = self._gauge("stalled", "1 while a wait, or a lack of progress, has lasted over service.stall_s.")
        self.progress_age_seconds = self._gauge(
            "progress_age_seconds", "Time since the process got on: a score, a batch, a step, a token; alert on the buffer's.")
        self.rpc_seconds = self._histogram(
            "rpc_seconds", "Time in which this process handled a call, long polls included.", "method", "code", buckets=_RPC_S)
        self.build_info = self._gauge("build_info", "Always 1; the labels say what runs.", "service", "version", "python")
        self.build_info.labels(service, slipstream.__version__, platform.python_version()).set(1)

    def observe_rpc(self, method: str, code: str, seconds: float) -> None:
        """One finished call, "/package.Service/Method"."""
        self.rpc_seconds.labels(method.rpartition(".")[2], code).observe(seconds)

    def waiting(self, current: tuple[str, float] | None, stalled: bool) -> None:
        """What the process waits for now. The label is the sentence up to its colon, numbers as #: few values in all."""
        self.waiting_seconds.clear()
        if current is not None:
            self.waiting_seconds.labels(re.sub(r"\d+", "#", current[0].partition(":")[0])).set(current[1])
        self.stalled.set(stalled)


class DeviceMetrics(_Group):
    """What trainer and rollout workers have that share devices."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "devices")
        self.held = self._gauge("held", "1 while this process may have memory on the shared devices: its turn.")
        self.held_seconds = self._counter("held_seconds", "Length of this process's turns, once they are over.")
        self.handover_seconds = self._counter(
            "handover_seconds", "Time of nobody's use: asked (workers were to leave), enter, leave (memory moved).", "part",
            known=("asked", "enter", "leave"))


class TraceMetrics(_Group):
    """What a process has whose run file names a collector of traces."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "")
        self.spans = self._counter(
            "trace_spans", "Spans: exported, refused (by the collector), dropped (no room, or no time).", "outcome")


class BufferMetrics(_Group):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "buffer")
        self.open_draws = self._gauge("open_draws", "Draws whose group is not terminal and not batched.")
        self.outstanding_groups = self._gauge(
            "outstanding_groups", "Groups drawn and not yet covered by a published step; the budget bounds it.")
        self.leases = self._gauge("leases", "Leases held now.", "kind")
        self.workers = self._gauge("workers", "Processes that were heard of within a lease period.", "service")
        self.unscored_samples = self._gauge("unscored_samples", "Samples submitted that wait for a score.")
        self.wanted_samples = self._gauge(
            "wanted_samples", "Samples that may be in generation now, drawn or not: the work of all rollout workers together.")
        self.complete_groups = self._gauge("complete_groups", "Groups ready for a batch.")
        self.bytes = self._gauge("bytes", "Bytes of bodies held in Redis.")
        self.quota_bytes = self._gauge("quota_bytes", "Most bytes of bodies that may be held in Redis.")
        self.published_step = self._gauge("published_step", "Newest step that has a policy version.")
        self.numbered_batch = self._gauge("numbered_batch", "Last batch whose composition is durable.")
        self.committed_batch = self._gauge("committed_batch", "Last batch covered by a durable checkpoint.")
        self.ledger_rebuilds = self._counter(
            "ledger_rebuilds", "Lost or rewound ledgers rebuilt from the batch log, by what proved it.", "proof")
        self.refused_starts = self._counter("refused_starts", "Trainer starts refused, by reason.", "reason")
        self.incarnation = self._gauge("incarnation", "Newest trainer incarnation.")
        self.max_lag = self._gauge("max_lag", "Bound on the lag of trained tokens, in steps.")
        self.imbalance = self._gauge("imbalance", "Draws that the ledger does not account for: 0, or a bug.")
        self.groups_dropped = self._counter("groups_dropped", "Groups that were never trained.", "reason")
        self.samples = self._counter(
            "samples", "Samples submitted: accepted, outdated, failed.", "outcome", known=("accepted", "outdated", "failed"))
        self.spilled = self._counter("spilled", "Bodies put into the object store because the quota was full.")
        self.rejected = self._counter("rejected", "Items of requests that were refused.", "reason")
        self.leases_expired = self._counter(
            "leases_expired", "Leases granted again because the holder was silent.", "kind", known=("sample", "scoring"))
        self.ledger_seconds = self._histogram("ledger_seconds", "Time of one ledger operation.", "operation", buckets=_RPC_S)


class RolloutMetrics(_Group):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "rollout")
        self.generated_tokens = self._counter("generated_tokens", "Tokens sampled.")
        self.active_slots = self._gauge("active_slots", "Sequences that are being decoded.")
        self.slots = self._gauge("slots", "Most sequences decoded together.")
        self.swaps = self._counter(
            "swaps", "Weight swaps: loaded, refused, canary (refused by it), failed.", "outcome",
            known=("loaded", "refused", "canary", "failed"))
        self.swap_seconds = self._histogram("swap_seconds", "Time without decoding because of a swap.")
        self.fetch_seconds = self._histogram("fetch_seconds", "Time to fetch and verify a policy version, beside decoding.")
        self.weight_reads = self._counter(
            "weight_reads", "Byte ranges of versions asked of node (its cache), peer, server (of weights), store.", "place",
            "outcome")
        self.weight_bytes = self._counter("weight_bytes", "Bytes of versions that came from there.", "place")
        self.peer_reads = self._counter(
            "peer_reads", "Byte ranges that other workers asked for: hit, joined (being read already), miss, absent, refused.",
            "outcome")
        self.peer_bytes = self._counter("peer_bytes", "Bytes of versions sent to other workers.")
        self.loaded_step = self._gauge("loaded_step", "Step of the loaded policy version.")
        self.policy_version = self._gauge("policy_version", "Number of the loaded policy version.")
        self.episodes = self._counter("episodes", "Episodes ended: submitted, outdated, failed, handed_back.", "outcome")
        self.environment_seconds = self._histogram("environment_seconds", "Time of one environment call.", "call")
        self.kv_cache_share = self._gauge("kv_cache_share", "Share of the engine's KV cache in use; 0 where it has none.")
        self.engine_waiting = self._gauge("engine_waiting", "Requests for which the engine has no room.")
        self.preemptions = self._counter(
            "preemptions", "Requests whose cache the engine threw away: for want of room, or to compute it anew after a swap.")
        self.drafts = self._counter("drafts", "Guesses judged, one for each sequence and step that had one: speculation.")
        self.draft_tokens = self._counter("draft_tokens", "Tokens guessed and judged.")
        self.accepted_tokens = self._counter(
            "accepted_tokens", "Of them, those accepted: a step with a guess gives 1 + accepted_tokens / drafts in the mean.")
        self.decode_seconds = self._histogram("decode_seconds", "Time of one decode step.", buckets=_RPC_S)


class WeightServerMetrics(_Group):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "weights")
        self.bytes = self._gauge("bytes", "Bytes of versions held in memory.")
        self.most_bytes = self._gauge("most_bytes", "Most bytes of versions held in memory or being read.")
        self.reads = self._counter(
            "reads", "Byte ranges asked for: hit, joined (being read for somebody else), miss, damaged.", "outcome")
        self.store_bytes = self._counter("store_bytes", "Bytes read from the object store.")
        self.sent_bytes = self._counter("sent_bytes", "Bytes sent to readers.")


class RewardMetrics(_Group):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "reward")
        self.scores = self._counter("scores", "Samples scored: scored, failed.", "outcome", known=("scored", "failed"))
        self.score_seconds = self._histogram("score_seconds", "Time of one scorer call.", "scorer", buckets=_RPC_S)


class TrainerMetrics(_Group):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "trainer")
        self.step = self._gauge("step", "Last finished optimizer step.")
        self.incarnation = self._gauge("incarnation", "Fencing number of this start.")
        self.checkpoint_step = self._gauge("checkpoint_step", "Last step covered by a durable checkpoint.")
        self.reward_mean = self._gauge("reward_mean", "Mean reward of the last batch.")
        self.loss = self._gauge("loss", "Loss of the last step.")
        self.grad_norm = self._gauge("grad_norm", "Gradient norm of the last step before clipping.")
        self.entropy = self._gauge("entropy", "Mean entropy of the policy over the trained tokens, in nats.")
        self.clip_share = self._gauge("clip_share", "Share of tokens whose ratio was clipped.")
        # Of the last step, by its key in metrics.jsonl; one without the figure leaves the gauge as it was.
        self.of_step = {figure: self._gauge(name, sentence) for figure, name, sentence in _OF_STEP}
        self.lag_tokens = self._gauge("lag_tokens", "Generated tokens of the last batch by their lag in steps.", "lag")
        self.alarm = self._plain(Gauge(
            "slipstream_alarm", "1 while a figure of training is outside of its band.", ("name",), registry=registry))
        self.lag_mean = self._gauge("lag_mean", "Mean lag of the groups of the last batch, in steps.")
        self.lag_max = self._gauge("lag_max", "Greatest lag of the groups of the last batch, in steps.")
        self.learning_rate = self._gauge("learning_rate", "Learning rate of the last step.")
        self.step_seconds = self._histogram("step_seconds", "Time of one optimizer step, without the wait for its batch.")
        self.wait_seconds = self._histogram("wait_seconds", "Time that one step waited for its batch.")
        self.publish_seconds = self._histogram("publish_seconds", "Time to write and announce one policy version.")
        self.checkpoint_seconds = self._histogram("checkpoint_seconds", "Time to write and verify one checkpoint.")
        self.tokens = self._counter("tokens", "Tokens that went through the model, context included.")
        self.trained_tokens = self._counter("trained_tokens", "Generated tokens that the loss covered.")
        self.samples = self._counter("samples", "Samples trained.")
        self.groups = self._counter("groups", "Groups trained.")
        self.skipped_steps = self._counter("skipped_steps", "Steps skipped because loss or gradient was not finite.")


class EnvironmentMetrics(_Group):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "environment")
        self.episodes = self._gauge("episodes", "Episodes open now.")
        self.call_seconds = self._histogram("call_seconds", "Time of one call of the user's code.", "call", buckets=_RPC_S)
        self.errors = self._counter("errors", "Calls of the user's code that raised.", "call", known=("reset", "step"))


def figures(registry: CollectorRegistry) -> dict[str, float]:
    """Gauges and counters by name without `slipstream_`, summed over labels, for status. Histograms and what the kernel says of
    the process are left out: views ask several times a second, and collecting those takes ten times as long."""
    found: dict[str, float] = {}
    for metric in _PLAIN.get(registry, ()):
        for family in metric.collect():
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    name = sample.name.removeprefix("slipstream_")
                    found[name] = found.get(name, 0.0) + sample.value
    found.pop("build_info", None)
    return found


def serve(registry: CollectorRegistry, port: int = 0, host: str = "127.0.0.1") -> str:
    """Serve /metrics in a daemon thread; port 0 = a free one. Returns host:port. Raises ConfigError when the port is taken."""
    check_port(host, port, "--metrics-port")
    server, _ = start_http_server(port, host, registry)
    return f"{host}:{server.server_port}"
