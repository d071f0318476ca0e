"""What vLLM is started with: engine arguments, environment variables and sampling parameters, from the run file alone.

Imports no vLLM, so that what a setting leads to can be tested anywhere. The arguments for devices other than CPUs are written
against vLLM 0.32's own definitions and have not yet run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from services.rollout.engine import Request
from slipstream import seeds
from slipstream.config import RunFile
from slipstream.errors import ConfigError, InvalidInput

CPU_BLOCK = 32  # vLLM's 128 on a CPU would let no prompt of the demo share a block
MOST_CPU_CACHE = 4 << 30  # bytes
BATCHED_TOKENS = 8192  # of one step, prompts included
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vllm.config.lora.MaxLoRARanks
# What the engine itself answers for; everything else goes into rollout.vllm.engine_args.
OWN = {
    "model": "model.path", "tokenizer": "model.path", "dtype": "model.dtype", "max_model_len": "rollout.context",
    "max_num_seqs": "rollout.slots", "seed": "run.seed", "logprobs_mode": "", "worker_extension_cls": "",
    "kv_cache_memory_bytes": "rollout.vllm.kv_cache_bytes", "block_size": "rollout.vllm.block_size",
    "enforce_eager": "rollout.vllm.enforce_eager", "tensor_parallel_size": "rollout.vllm.tensor_parallel",
    "data_parallel_size": "rollout.vllm.data_parallel", "data_parallel_size_local": "rollout.vllm.data_parallel_local",
    "data_parallel_address": "", "data_parallel_rpc_port": "rollout.vllm.group_port", "data_parallel_start_rank": "",
    "enable_expert_parallel": "rollout.vllm.expert_parallel", "all2all_backend": "rollout.vllm.all2all",
    "enable_sleep_mode": "run.placement",
    "enable_lora": "model.lora", "max_lora_rank": "model.lora.rank", "lora_target_modules": "model.lora.targets",
    "enable_return_routed_experts": "rollout.capture_routes", "override_generation_config": "rollout.vllm.sampling",
    "speculative_config": "rollout.speculation", "spec_method": "rollout.speculation", "spec_model": "rollout.speculation",
    "spec_tokens": "rollout.speculation",
}
# Variables per fabric, of DeepEP (vLLM's `deepep_v2`) and NCCL; sources: vllm/envs.py, awslabs' DeepEP V2 benchmark.
FABRICS: dict[str, dict[str, str]] = {
    "nvlink": {"VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE": "0", "EP_DISABLE_GIN": "1"},
    "infiniband": {"VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE": "1"},
    "efa": {  # a CPU thread posts the transfers: p5, p5e, and wherever GPUs cannot reach the card themselves
        "VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE": "1", "NCCL_NET_PLUGIN": "ofi", "NCCL_GIN_ENABLE": "1", "NCCL_GIN_TYPE": "2",
        "FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"},
    "efa-gda": {  # GPUs post them: p5en and newer; type 5 alone crashes for want of strong signals
        "VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE": "1", "NCCL_NET_PLUGIN": "ofi", "NCCL_GIN_TYPE": "5",
        "NCCL_SYM_GIN_KERNELS_ENABLE": "0", "FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"},
}


def environment(run: RunFile, cpu: bool) -> dict[str, str]:
    """Variables that vLLM reads at import, for this process and those that it starts."""
    variables = {
        # Every load warns that rotary embeddings have no weights: only errors go to the log.
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads of gRPC
    }
    if cpu:
        # One process for the engine, none for its only worker. Eager CPU code needs no dynamo, whose helpers would compile for
        # a minute at the first request. The service's own OMP_NUM_THREADS holds instead of a binding to cores.
        variables |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if run.rollout.speculation.method == "ngram":  # vLLM asks for one thread, but numba's others would spin beside it
        variables["NUMBA_NUM_THREADS"] = "1"
    if run.rollout.vllm.all2all.startswith("deepep"):
        variables |= FABRICS[run.rollout.vllm.fabric] | {"EP_REUSE_NCCL_COMM": "0"}
    return variables


def engine_arguments(run: RunFile, model: str, shape: Mapping[str, Any], extension: str, cpu: bool) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs for the checkpoint in the folder `model`, whose config.json is `shape`.

    Raises ConfigError for an engine argument that another setting owns, and as speculation_arguments does.
    """
    rollout, own = run.rollout, run.rollout.vllm
    for name in own.engine_args:
        if name in OWN:
            remedy = f"set {OWN[name]} instead" if OWN[name] else "it cannot be set"
            raise ConfigError(f"rollout.vllm.engine_args.{name} is decided elsewhere: {remedy}")
    arguments: dict[str, Any] = {
        "model": model, "skip_tokenizer_init": True, "generation_config": "vllm", "dtype": run.model.dtype,
        "seed": run.run.seed & 0x7FFFFFFF, "max_model_len": rollout.context, "max_num_seqs": rollout.slots,
        "max_num_batched_tokens": max(BATCHED_TOKENS, rollout.context, rollout.slots), "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True, "enforce_eager": cpu if own.enforce_eager is None else own.enforce_eager,
        "tensor_parallel_size": own.tensor_parallel, "worker_extension_cls": extension, "enable_log_requests": False,
        "use_tqdm_on_load": False,
    }
    block = own.block_size or (CPU_BLOCK if cpu else 0)
    if block:
        arguments["block_size"] = block
    if own.kv_cache_bytes or cpu:
        arguments["kv_cache_memory_bytes"] = own.kv_cache_bytes or cache_bytes(run, shape, block)
    if cpu:
        arguments["distributed_executor_backend"] = "uni"
    elif rollout.capture_routes:
        arguments["enable_return_routed_experts"] = True
    if run.run.placement == "shared" and not cpu:  # refused on a CPU
        arguments["enable_sleep_mode"] = True
    if own.data_parallel > 1:
        arguments["data_parallel_size"] = own.data_parallel
        arguments["data_parallel_size_local"] = own.data_parallel_local or own.data_parallel
    if own.expert_parallel:
        arguments["enable_expert_parallel"] = True
    if own.all2all:
        arguments["all2all_backend"] = own.all2all
    return arguments | speculation_arguments(run, arguments["max_num_batched_tokens"], cpu) | own.engine_args


def speculation_arguments(run: RunFile, room: int, cpu: bool) -> dict[str, Any]:
    """Further arguments for guessed tokens; none without. `room`: tokens of a step, raised so that no guess is cut for it.

    Raises ConfigError for a guesser that cannot run with routes returned.
    """
    guess, slots = run.rollout.speculation, run.rollout.slots
    if guess.method == "off":
        return {}
    if guess.method == "suffix" and run.rollout.capture_routes and not cpu:
        raise ConfigError(
            "rollout.speculation.method = suffix with rollout.capture_routes = true: vLLM's model runner that returns routes "
            "has no such guesser; set method = ngram, or capture_routes = false")
    config: dict[str, Any] = {"method": guess.method, "num_speculative_tokens": guess.tokens}
    if guess.method == "ngram":
        config |= {"prompt_lookup_min": guess.prompt_lookup_min, "prompt_lookup_max": guess.prompt_lookup_max}
    else:
        config["suffix_decoding_max_cached_requests"] = guess.answers
    if cpu:
        # A table, though the same for any number of sequences: without one vLLM fills a first step that has one token left to
        # compute with guesses of token -1, for its graphs, and its CPU sampler takes their chance from the row before.
        config["num_speculative_tokens_per_batch_size"] = [(1, slots, guess.tokens)]
    return {"speculative_config": config, "max_num_batched_tokens": max(room, slots * (1 + guess.tokens))}


def node_arguments(run: RunFile, node: int, address: str, port: int) -> dict[str, Any]:
    """Further arguments for one node of several, the leader's (0) or a headless one's: where the parts find each other."""
    found: dict[str, Any] = {"data_parallel_address": address, "data_parallel_rpc_port": port}
    return found | ({"data_parallel_start_rank": node * run.rollout.vllm.data_parallel_local} if node else {})


def slot_arguments(rank: int, layers: Sequence[str]) -> dict[str, Any]:
    """Further arguments for an adapter in slots: one that serves, and one that is tried. `layers`: full names of what is
    adapted. Raises ConfigError for a rank above vLLM's largest."""
    roomy = next((known for known in RANKS if known >= rank), 0)
    if not roomy:
        raise ConfigError(f"model.lora.rank = {rank} exceeds {RANKS[-1]}, vLLM's largest; lower it")
    return {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": roomy,
            "lora_target_modules": sorted({layer.rpartition(".")[2] for layer in layers})}


def cache_bytes(run: RunFile, shape: Mapping[str, Any], block: int) -> int:
    """Memory for the whole context of every slot, and a spare block each: at most MOST_CPU_CACHE."""
    heads = int(shape.get("num_attention_heads") or 1)
    kv_heads = int(shape.get("num_key_value_heads") or heads)
    width = int(shape.get("head_dim") or shape.get("hidden_size", 1) // heads)
    token = 2 * int(shape.get("num_hidden_layers") or 1) * kv_heads * width * (4 if run.model.dtype == "float32" else 2)
    blocks = run.rollout.slots * (math.ceil(run.rollout.context / block) + 1)
    return min(MOST_CPU_CACHE, blocks * block * token)


def sampling(run: RunFile, request: Request) -> dict[str, Any]:
    """Keyword arguments of SamplingParams, but for the kind of output.

    The seed names where in the answer the request begins, so that a resumed one draws afresh and not the same again.
    """
    longest = min(request.max_new_tokens, run.rollout.context - len(request.prompt))
    return {
        "temperature": 0.0 if request.greedy else request.temperature, "max_tokens": longest, "logprobs": 0,
        "flat_logprobs": True, "seed": seeds.mix(seeds.mix(request.seed) + request.position) >> 1, "detokenize": False,
        "stop_token_ids": list(request.stop_token_ids), "ignore_eos": True, **run.rollout.vllm.sampling,
    }


def check(run: RunFile, request: Request, vocabulary: int) -> None:
    """Raises InvalidInput, naming the field, for a request that can never run here."""
    size, context = len(request.prompt), run.rollout.context
    if not size:
        raise InvalidInput("prompt is empty; at least one token is needed", "EMPTY_PROMPT", field="prompt")
    if size >= context:
        raise InvalidInput(
            f"prompt has {size} tokens; the context of {context} leaves room for at most {context - 1}: shorten it or raise "
            "rollout.context", "PROMPT_TOO_LONG", field="prompt", value=size)
    if not request.temperature > 0:
        raise InvalidInput(
            f"temperature = {request.temperature} is not above 0; use greedy for the most probable token", "TEMPERATURE",
            field="temperature", value=request.temperature)
    if request.greedy and request.temperature != 1:
        raise InvalidInput(
            f"temperature = {request.temperature} with greedy: vLLM gives the log-probabilities of the most probable token at "
            "1 only; leave it out", "TEMPERATURE", field="temperature", value=request.temperature)
    if request.max_new_tokens < 1:
        raise InvalidInput(
            f"max_new_tokens = {request.max_new_tokens} is not at least 1", "MAX_NEW_TOKENS", field="max_new_tokens")
    if request.routes and not run.rollout.capture_routes:
        raise InvalidInput("routes are not captured here; set rollout.capture_routes = true", "ROUTES", field="routes")
    if not 0 <= request.prompt.min() <= request.prompt.max() < vocabulary:
        raise InvalidInput(f"prompt has a token outside of 0..{vocabulary - 1}", "TOKEN", field="prompt")
