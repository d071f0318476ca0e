"""The tables of a run file that say how is trained: [algorithm], [critic], [trainer], [sft], [alarms]. See config.py.

What a table says against itself is refused here; what two tables say against each other, in config.py.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from slipstream.config_sections import PositiveInt, Seconds, Section

# Named starting points of [algorithm]: what differs from the defaults, which are those of async-moe. Keys of the run file win.
PRESETS: dict[str, dict[str, Any]] = {
    "async-moe": {},
    "grpo": {"dual_clip": None},
    "dapo": {"dual_clip": None, "mask_truncated": True},
    "gspo-moe": {
        "policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None, "aggregation": "sequence_mean"},
    "ppo": {"advantage": "gae", "gae_lambda": 0.95, "clip_high": 0.2, "dual_clip": None},
}

# The policy losses that know a dual clip.
DUAL_CLIPPED = ("ppo", "gspo", "gspo_token")


class Algorithm(Section):
    preset: Literal["async-moe", "grpo", "dapo", "gspo-moe", "ppo"] = Field(
        default="async-moe", description="Starting point; other keys of this table override it."
    )
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae", "none"] = Field(
        default="grpo",
        description="What a reward is compared with: the group's mean (grpo: over its std), the batch, or a critic (gae); "
        "none = rewards play no part, the teacher alone does.",
    )
    teacher: str = Field(
        default="", description="Hugging Face directory of a teacher with the model's vocabulary: on-policy distillation."
    )
    teacher_coefficient: float = Field(
        default=1.0, gt=0, description="Factor of log pi_teacher - log pi_sampler of each token in its advantage."
    )
    credit: Literal["sample", "turn", "token"] = Field(
        default="sample",
        description="Where rewards lie: all on the last token, or as the score's per_turn or per_token values say.",
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="gae: what a reward is worth one generated token earlier.")
    gae_lambda: float = Field(
        default=1.0, ge=0, le=1, description="gae: 1 = what really came, 0 = what the critic expects of the next token."
    )
    whiten: bool = Field(default=True, description="gae: advantages to mean 0 and variance 1 over the tokens of the step.")
    policy_loss: Literal["ppo", "gspo", "gspo_token", "cispo", "sapo", "dppo_tv"] = Field(
        default="ppo", description="Loss per token, or per row (gspo), with its trust region."
    )
    clip_low: float = Field(default=0.2, ge=0, le=1, description="Lower clip of the probability ratio, below 1.")
    clip_high: float = Field(default=0.28, ge=0, description="Upper clip of the probability ratio, above 1.")
    dual_clip: float | None = Field(default=3.0, gt=1, description="Cap of the loss for negative advantages; none = off.")
    tau_positive: float = Field(default=1.0, gt=0, description="sapo: temperature of the gate for positive advantages.")
    tau_negative: float = Field(default=1.05, gt=0, description="sapo: the same for negative ones.")
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "sequence_constant"] = Field(
        default="token_mean", description="What the sum of token losses is divided by; always of the whole step."
    )
    anchor: Literal["sampler", "recomputed", "interpolated"] = Field(
        default="sampler", description="Proximal policy: centre of the trust region."
    )
    correction: Literal["none", "full", "truncated", "masked"] = Field(
        default="none", description="Importance weight of anchor over sampler: as it is, capped (TIS), or masked (IcePop)."
    )
    correction_low: float = Field(default=0.5, ge=0, description="masked: weights below drop their token.")
    correction_high: float = Field(default=2.0, gt=0, description="truncated: the cap; masked: weights above drop their token.")
    sequence_low: float | None = Field(default=None, gt=0, description="Drop rows whose geometric mean of pi/mu is below.")
    sequence_high: float | None = Field(default=None, gt=0, description="Drop rows whose geometric mean of pi/mu is above.")
    veto_below: float | None = Field(default=None, gt=0, description="Drop rows in which any token has pi/mu below this.")
    off_policy_delta: float | None = Field(
        default=None, ge=0, description="Drop rows with a negative advantage that drifted further than this (OPSM)."
    )
    kl: Literal["none", "k1", "k2", "k3", "k3+"] = Field(default="none", description="Divergence from the reference model.")
    kl_in: Literal["loss", "reward"] = Field(default="loss", description="Where the divergence is taken off; reward: k1 only.")
    kl_coefficient: float = Field(default=1e-3, gt=0, description="Factor of the divergence.")
    reference: str = Field(default="", description="Hugging Face directory of the reference model; empty = weights of step 0.")
    entropy_coefficient: float = Field(default=0.0, description="Factor of an entropy bonus.")
    overlong_margin: int = Field(
        default=0, ge=0, description="Tokens before rollout.max_new_tokens in which the reward falls by up to 1; 0 = off."
    )
    mask_truncated: bool = Field(default=False, description="Leave out answers cut off by the token limit, of counts too.")
    balance_coefficient: float = Field(
        default=0.0, ge=0, description="Factor of the routers' load-balancing loss, with counts of the whole step; 0 = off."
    )
    router_z_coefficient: float = Field(default=0.0, ge=0, description="Factor of the routers' z-loss; 0 = off.")
    route_replay: Literal["auto", "sampler", "trainer", "none"] = Field(
        default="auto", description="Whose experts are trained with: the sampler's where samples carry them (auto), or always; "
        "the trainer's own, of a pass before the first of several optimizer steps on a batch (trainer); or live ones (none)."
    )
    route_check_every: PositiveInt = Field(
        default=10, description="Steps between proofs that replayed routes bring the trainer closer to the sampler."
    )

    @property
    def replays_sampler(self) -> bool:
        """Whether routes that samples carry have a use."""
        return self.route_replay in ("auto", "sampler")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        if isinstance(data, dict):
            if data.get("preset") == "ppo" and data.get("advantage", "gae") != "gae":
                raise ValueError(
                    f"preset = ppo with advantage = {data['advantage']}: the preset is GAE with a critic; remove advantage, or "
                    "take another preset, such as grpo")
            data = PRESETS.get(str(data.get("preset", "async-moe")), {}) | data
            if data.get("policy_loss", "ppo") not in DUAL_CLIPPED:
                data = {"dual_clip": None} | data
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Algorithm:
        if self.anchor == "sampler" and self.correction != "none":
            raise ValueError(
                f"correction = {self.correction} with anchor = sampler: the weight is anchor over sampler, which is 1; "
                "set anchor = recomputed or interpolated, or correction = none")
        if self.anchor != "sampler" and self.correction == "none":
            raise ValueError(
                f"anchor = {self.anchor} with correction = none: the trust region would be centred on a policy that never "
                "sampled; set correction, or anchor = sampler")
        if self.policy_loss in ("gspo", "gspo_token") and self.aggregation != "sequence_mean":
            raise ValueError(
                f"policy_loss = {self.policy_loss} with aggregation = {self.aggregation}: its ratio is a mean over the row, so "
                "rows must be averaged; set aggregation = sequence_mean")
        if self.dual_clip is not None and self.policy_loss not in DUAL_CLIPPED:
            raise ValueError(f"dual_clip = {self.dual_clip} has no meaning for policy_loss = {self.policy_loss}; remove it")
        self._credit_has_a_meaning()
        if self.kl_in == "reward" and self.kl not in ("none", "k1"):
            raise ValueError(f"kl = {self.kl} with kl_in = reward: only k1 is unbiased there; set kl = k1, or kl_in = loss")
        if self.kl == "k1" and self.kl_in == "loss":
            raise ValueError("kl = k1 with kl_in = loss: its gradient is 0 on average; set kl = k2 or k3+, or kl_in = reward")
        return self

    def _credit_has_a_meaning(self) -> None:
        """Raise for what has no meaning when advantages differ within a row, or only with a critic."""
        if self.policy_loss == "gspo" and (self.advantage == "gae" or self.credit != "sample" or self.teacher):
            field = "advantage = gae" if self.advantage == "gae" else "a teacher" if self.teacher else f"credit = {self.credit}"
            raise ValueError(
                f"policy_loss = gspo with {field}: its ratio is one for the whole row, and tokens of a row would have "
                "different advantages; set policy_loss = gspo_token")
        if self.credit == "token" and self.advantage not in ("gae", "reinforce_pp"):
            raise ValueError(
                f"credit = token with advantage = {self.advantage}: token t of one answer cannot be compared with token t of "
                "another; set credit = turn, or advantage = gae or reinforce_pp")
        self._teacher_has_a_use()
        if self.advantage == "gae":
            return
        for name, neutral in (("gamma", 1.0), ("gae_lambda", 1.0), ("whiten", True)):
            if getattr(self, name) != neutral:
                raise ValueError(
                    f"{name} = {getattr(self, name)} with advantage = {self.advantage}: only gae, with a critic, has a use for "
                    "it; remove it, or set advantage = gae")

    def _teacher_has_a_use(self) -> None:
        """Raise when a teacher is missing, or alone and yet something shapes the rewards."""
        if not self.teacher:
            if self.advantage == "none":
                raise ValueError("advantage = none without teacher: nothing would be learnt; set teacher, or another advantage")
            if self.teacher_coefficient != 1.0:
                raise ValueError(f"teacher_coefficient = {self.teacher_coefficient} without teacher; set teacher, or remove it")
        if self.advantage == "none":
            shaped = {"credit": self.credit != "sample", "overlong_margin": self.overlong_margin > 0,
                      "kl_in": self.kl != "none" and self.kl_in == "reward"}
            if name := next((name for name, set_ in shaped.items() if set_), None):
                raise ValueError(
                    f"{name} = {getattr(self, name)} with advantage = none: rewards play no part; remove it, or set another "
                    "advantage, to which the teacher's is added")


class Critic(Section):
    path: str = Field(
        default="", description="Hugging Face directory of the critic's backbone; empty = the policy's weights of step 0."
    )
    learning_rate: float = Field(default=1e-5, gt=0, description="AdamW learning rate; betas, eps and decay are the trainer's.")
    clip: float | None = Field(
        default=0.5, gt=0, description="A value that moved further from that before the step loses its gradient; none = off."
    )
    updates: PositiveInt = Field(default=1, description="Optimizer steps of the critic on each batch.")
    warmup_steps: int = Field(default=0, ge=0, description="First steps of the run in which only the critic learns.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="The critic's global gradient norm is clipped to this.")


class Warmup(Section):
    steps: int = Field(default=0, ge=0, description="Supervised steps on the environments' answers before RL; 0 = none.")
    rows: PositiveInt = Field(default=64, description="Answers per supervised step.")
    learning_rate: float = Field(default=3e-3, gt=0, description="Peak learning rate of the warm-up.")
    ramp_steps: PositiveInt = Field(default=20, description="Steps of linear learning-rate ramp.")
    keep_optimizer: bool = Field(default=True, description="Carry the optimizer state over into RL.")


class Parallel(Section):
    """The trainer on several ranks; see docs/guides/expert-parallelism.md."""

    ranks: PositiveInt = Field(default=1, description="Trainer processes; 1 = no process group at all.")
    experts: PositiveInt = Field(default=1, description="Ranks that a layer's experts are spread over.")
    tensor: PositiveInt = Field(default=1, description="Ranks that split each dense matrix, with one batch; the rest is FSDP.")
    context: PositiveInt = Field(
        default=1, description="Ranks that share each sequence, for long samples: they split its tokens and attention heads."
    )
    pipeline: PositiveInt = Field(default=1, description="Pipeline stages; only 1 works, with FSDP and experts.")
    recompute: bool = Field(
        default=False, description="Keep only what enters a layer and compute the rest again in the backward pass."
    )
    exchange: Literal["auto", "deep_ep", "hierarchical", "flat", "all_gather", "copy"] = Field(
        default="auto", description="How tokens reach their experts; auto = the fastest by the cost model."
    )
    ranks_per_node: int = Field(default=0, ge=0, description="Ranks with fast links to each other; 0 = those of a machine.")
    canonical: bool = Field(default=False, description="Sum in one order, so that flat and hierarchical give the same bits.")
    plan_routes: bool = Field(
        default=False, description="With replayed routes: tell ranks once a step how many tokens each layer sends, not in each."
    )
    collective_timeout_s: Seconds = Field(default=45, description="A rank that others wait for longer than this is dead.")
    step_timeout_s: Seconds = Field(
        default=1800, description="A step that takes longer is hung: every rank writes its stacks and ends, for a restart."
    )
    start_timeout_s: Seconds = Field(default=600, description="Ranks wait this long for each other's models at a start.")
    instance_type: str = Field(default="", description="EC2 type of the nodes, such as p5en.48xlarge: links and EFA preset.")
    transport: Literal["", "gda", "proxy"] = Field(default="", description="DeepEP over EFA; empty = the best of the instance.")
    fast_gb_s: float = Field(default=0, ge=0, description="Link of a rank within a node, GB/s; 0 = the instance's, else 450.")
    slow_gb_s: float = Field(default=0, ge=0, description="Link of a rank between nodes, GB/s; 0 = the instance's, else 50.")
    max_tokens: int = Field(default=4096, ge=1, le=8192, description="DeepEP: most tokens of a rank in one dispatch.")
    num_sms: PositiveInt = Field(default=24, description="DeepEP: streaming multiprocessors of an exchange.")
    hybrid: bool = Field(default=True, description="DeepEP: one copy a node, relayed over NVLink.")
    pad_hidden: bool = Field(default=False, description="DeepEP: pad hidden sizes to a multiple of 256 (gpt-oss).")

    @model_validator(mode="after")
    def _consistent(self) -> Parallel:
        if self.pipeline > 1:
            other = "FSDP" if self.experts == 1 else "experts"
            raise ValueError(
                f"pipeline = {self.pipeline} together with {other}: transformers refuses both combinations; set pipeline = 1")
        if self.ranks % self.tensor:
            raise ValueError(f"tensor = {self.tensor} does not divide ranks = {self.ranks}")
        if self.ranks % (self.tensor * self.context):
            raise ValueError(f"context = {self.context} x tensor = {self.tensor} does not divide ranks = {self.ranks}")
        if self.experts > 1 and (self.ranks % self.experts or self.experts % self.tensor):
            raise ValueError(
                f"experts = {self.experts} must divide ranks = {self.ranks} and be a multiple of tensor = {self.tensor}")
        if self.ranks_per_node and self.experts > self.ranks_per_node and self.experts % self.ranks_per_node:
            raise ValueError(
                f"experts = {self.experts} is no multiple of ranks_per_node = {self.ranks_per_node}: take whole nodes")
        if self.exchange == "deep_ep" and self.experts == 1:
            raise ValueError("exchange = deep_ep with experts = 1: there is nothing to exchange; set experts")
        if self.plan_routes and self.exchange not in ("auto", "hierarchical", "flat"):
            raise ValueError(f"plan_routes beside exchange = {self.exchange}, which asks for no counts: set it to false")
        return self


class Trainer(Section):
    learning_rate: float = Field(default=1e-6, gt=0, description="AdamW learning rate.")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="AdamW betas.")
    eps: float = Field(default=1e-8, gt=0, description="AdamW epsilon.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Global gradient norm is clipped to this.")
    tokens_per_microbatch: PositiveInt = Field(default=16384, description="Padded tokens of one forward/backward.")
    packing: Literal["rows", "packed"] = Field(
        default="rows", description="How a forward/backward holds its segments: rows = one a row, padded to the longest; "
        "packed = one after the other, without padding."
    )
    minibatches: PositiveInt = Field(
        default=1, description="Parts of whole groups that a batch is split into; each is an optimizer step of its own."
    )
    epochs: PositiveInt = Field(
        default=1, description="Passes over a batch, each split anew: minibatches × epochs optimizer steps make one version."
    )
    logit_rows: PositiveInt = Field(
        default=8192, description="Positions whose logits are held at a time; more are computed twice, in chunks."
    )
    publish_every: PositiveInt = Field(default=1, description="Steps between policy versions.")
    full_every: PositiveInt = Field(
        default=16, description="Versions from one complete to the next; between them, 16-bit weights that changed little are "
        "written as patches; 1 = all complete."
    )
    checkpoint_every: PositiveInt = Field(default=10, description="Steps between checkpoints.")
    keep_checkpoints: PositiveInt = Field(default=2, description="Complete checkpoints kept.")
    nonfinite_limit: PositiveInt = Field(
        default=3, description="Steps in a row skipped for a loss or gradient that is not finite before the trainer ends."
    )
    threads: int = Field(default=1, ge=0, description="CPU threads of torch; 0 = all.")
    warmup: Warmup = Warmup()
    parallel: Parallel = Parallel()

    @property
    def mini_steps(self) -> int:
        """Optimizer steps on one batch, when every mini-batch has a group with a signal."""
        return self.minibatches * self.epochs


class Supervised(Section):
    """Supervised fine-tuning, for `slipstream sft` alone; optimizer, micro-batches and checkpoints are those of [trainer]."""

    path: str = Field(description="JSONL, Parquet or Arrow file, Hugging Face dataset folder, or s3:// place of either.")
    split: str = Field(default="", description="Split of a dataset that has several.")
    prompt: str = Field(default="prompt", description="Column of texts that come before the answer; not learnt.")
    answer: str = Field(default="answer", description="Column of the answers, texts or numbers.")
    messages: str = Field(default="messages", description="Column of chats: every turn of the assistant is learnt.")
    system: str = Field(default="", description="Makes a chat of each prompt, with this system message before it.")
    endpoint: str = Field(default="", description="Endpoint of an S3-compatible store, for an s3:// path.")
    region: str = Field(default="us-east-1", description="S3 region.")
    max_tokens: PositiveInt = Field(default=4096, description="Most tokens of a row.")
    too_long: Literal["refuse", "skip"] = Field(default="refuse", description="What happens to longer rows.")
    rows: PositiveInt = Field(default=32, description="Rows of one optimizer step.")
    epochs: float | None = Field(default=None, gt=0, description="Passes over the rows, instead of run.steps.")
    ramp_steps: PositiveInt = Field(default=10, description="Steps of linear ramp to trainer.learning_rate.")
    decay: Literal["constant", "linear", "cosine"] = Field(default="cosine", description="Learning rate after the ramp.")
    validation: float = Field(default=0.05, ge=0, lt=1, description="Share of the rows that is held out; 0 = none.")
    validate_every: PositiveInt = Field(default=50, description="Steps between losses of the held-out rows.")


class Alarms(Section):
    """Bands of a step's figures; 0 = that one is not judged. Why these values: docs/guides/operations.md."""

    steps: PositiveInt = Field(
        default=5, description="Steps in a row outside of a band that raise its alarm, or inside that clear it."
    )
    numeric_gap: float = Field(
        default=0.05, ge=0, description="Most mean |trainer - sampler| log-probability of tokens at lag 0, in nats; 0 = off."
    )
    staleness_gap: float = Field(default=0.5, ge=0, description="The same for all other tokens; 0 = off.")
    k3: float = Field(default=0.2, ge=0, description="Most estimated KL of sampler and trainer, in nats; 0 = off.")
    ratio_max: float = Field(default=1000, ge=0, description="Largest probability ratio of a token; 0 = off.")
    ess: float = Field(default=0.5, ge=0, le=1, description="Least effective sample size, as a share of tokens; 0 = off.")
    clip_share: float = Field(default=0.3, ge=0, le=1, description="Most share of clipped tokens; 0 = off.")
    route_flip_share: float = Field(default=0.25, ge=0, le=1, description="Most share of flipped routes; 0 = off.")
    expert_load: float = Field(
        default=10, ge=0, description="Most tokens of a layer's busiest expert over its mean; 0 = off."
    )
    dead_experts: float = Field(default=0.5, ge=0, le=1, description="Most share of experts without a token; 0 = off.")
    grad_norm: float = Field(default=100, ge=0, description="Largest gradient norm before clipping; 0 = off.")
    entropy: float = Field(default=0, ge=0, description="Least mean entropy of the policy, in nats; 0 = off.")
    without_signal: float = Field(
        default=0.95, ge=0, le=1, description="Most share of groups without signal; 0 = off."
    )
