"""The parts of the vLLM engine that need no vLLM: what it is started with, what it loads, how routes are filed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.rollout import vllm_arguments, vllm_temperatures
from services.rollout.concurrency import Drafts
from services.rollout.engine import Generation, Request
from services.rollout.service import engine_of
from services.rollout.vllm_answers import Asked, generation, rest
from services.rollout.vllm_checkpoint import Checkpoints, checksum, remove_orphans
from services.rollout.vllm_routes import Rows
from services.rollout.vllm_signals import Signals
from slipstream.errors import ConfigError, InvalidInput
from slipstream.manifest import RawTensor
from slipstream.model import ADAPTER_FILE, bare, files, state
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.sample import FINISH_STOP, Span
from tests.engine_models import FAMILIES, MOE, tiny
from tests.rollout_runs import run_file

SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2, "vocab_size": 32}


def arguments(folder: Path, cpu: bool, rollout: dict[str, Any] | None = None, **vllm: Any) -> dict[str, Any]:
    run = run_file(folder, rollout={"engine": "vllm", "vllm": vllm, **(rollout or {})})
    return vllm_arguments.engine_arguments(run, "/model", SHAPE, "module.Class", cpu)


def test_on_a_cpu_dtype_cache_and_block_are_explicit(tmp_path: Path) -> None:
    """vLLM's `auto` would make float32 checkpoints bfloat16, its block of 128 share no prompt, its cache take 4 GB."""
    found = arguments(tmp_path, cpu=True)
    assert (found["dtype"], found["logprobs_mode"], found["block_size"]) == ("float32", "processed_logprobs", 32)
    assert (found["max_num_seqs"], found["max_model_len"], found["enforce_eager"]) == (16, 64, True)
    assert found["kv_cache_memory_bytes"] == 16 * 3 * 32 * (2 * 2 * 2 * 32 * 4)  # slots × blocks × tokens × bytes of a token
    assert found["distributed_executor_backend"] == "uni" and "enable_return_routed_experts" not in found


def test_on_a_gpu_the_engine_decides_what_nobody_set(tmp_path: Path) -> None:
    """Routes are the engine's own there. Not yet run on a GPU."""
    found = arguments(tmp_path, cpu=False, rollout={"capture_routes": True})
    assert not found["enforce_eager"] and found["enable_return_routed_experts"]
    assert not {"block_size", "kv_cache_memory_bytes", "distributed_executor_backend"} & found.keys()
    assert arguments(tmp_path, cpu=False, engine_args={"gpu_memory_utilization": 0.8})["gpu_memory_utilization"] == 0.8


def test_an_engine_that_shares_its_devices_can_sleep(tmp_path: Path) -> None:
    """On a GPU memory comes from the allocator that can give it back; a CPU refuses that. Not yet run on a GPU."""
    run = run_file(tmp_path, run={"placement": "shared"}, rollout={"engine": "vllm"})
    gpu, cpu = (vllm_arguments.engine_arguments(run, "/model", SHAPE, "module.Class", on_cpu) for on_cpu in (False, True))
    assert gpu["enable_sleep_mode"] is True and "enable_sleep_mode" not in cpu | arguments(tmp_path, cpu=False)
    with pytest.raises(ConfigError, match=r"enable_sleep_mode is decided elsewhere: set run\.placement"):
        arguments(tmp_path, cpu=False, engine_args={"enable_sleep_mode": True})


def test_expert_parallel_engines_exchange_tokens_by_name(tmp_path: Path) -> None:
    """Sixteen devices on two nodes through DeepEP: the engine's arguments, and what the fabric asks of the environment."""
    vllm = {"data_parallel": 16, "data_parallel_local": 8, "expert_parallel": True, "all2all": "deepep_v2", "fabric": "efa-gda"}
    found = arguments(tmp_path, cpu=False, **vllm)
    assert (found["data_parallel_size"], found["data_parallel_size_local"]) == (16, 8)
    assert found["enable_expert_parallel"] and found["all2all_backend"] == "deepep_v2"
    run = run_file(tmp_path, rollout={"engine": "vllm", "vllm": vllm})
    variables = vllm_arguments.environment(run, cpu=False)
    assert (variables["NCCL_GIN_TYPE"], variables["NCCL_SYM_GIN_KERNELS_ENABLE"]) == ("5", "0")
    assert "TORCHDYNAMO_DISABLE" not in variables
    plain = vllm_arguments.environment(run_file(tmp_path, rollout={"engine": "vllm"}), cpu=True)
    assert not any(name.startswith(("NCCL", "FI_", "VLLM_DEEPEP")) for name in plain) and plain["TORCHDYNAMO_DISABLE"] == "1"


def test_each_node_of_an_engine_is_started_with_its_share(tmp_path: Path) -> None:
    """Three nodes of two replicas: all are told where the leader is, the headless ones also with which replica they begin."""
    run = run_file(tmp_path, rollout={"engine": "vllm", "vllm": {"data_parallel": 6, "data_parallel_local": 2}})
    assert run.rollout.vllm.nodes == 3 and run_file(tmp_path).rollout.vllm.nodes == 1
    leader, last = (vllm_arguments.node_arguments(run, node, "10.0.0.1", 29550) for node in (0, 2))
    assert leader == {"data_parallel_address": "10.0.0.1", "data_parallel_rpc_port": 29550}
    assert last == leader | {"data_parallel_start_rank": 4}


def test_guesses_are_an_argument_of_their_own(tmp_path: Path) -> None:
    """With room in a step for all of them. On a CPU the table that says how many, always the same, keeps vLLM from filling
    steps with guesses of token -1, which its CPU sampler misjudges. Not yet run on a GPU."""
    speculation = {"method": "ngram", "tokens": 6, "prompt_lookup_min": 3, "prompt_lookup_max": 5}
    gpu, cpu = (arguments(tmp_path, on_cpu, rollout={"slots": 2000, "speculation": speculation}) for on_cpu in (False, True))
    assert gpu["speculative_config"] == {
        "method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 3, "prompt_lookup_max": 5}
    assert cpu["speculative_config"] == gpu["speculative_config"] | {"num_speculative_tokens_per_batch_size": [(1, 2000, 6)]}
    assert gpu["max_num_batched_tokens"] == 2000 * 7
    learnt = arguments(tmp_path, cpu=False, rollout={"speculation": {"method": "suffix", "answers": 99}})
    assert learnt["speculative_config"] == {
        "method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_cached_requests": 99}
    routed = {"speculation": {"method": "suffix"}, "capture_routes": True}
    assert "speculative_config" in arguments(tmp_path, cpu=True, rollout=routed)
    with pytest.raises(ConfigError, match="method = suffix with rollout.capture_routes = true.*method = ngram"):
        arguments(tmp_path, cpu=False, rollout=routed)
    assert "speculative_config" not in arguments(tmp_path, cpu=True)
    run = run_file(tmp_path, rollout={"engine": "vllm", "speculation": speculation})
    assert vllm_arguments.environment(run, cpu=True)["NUMBA_NUM_THREADS"] == "1"  # a second one spins: twice the CPU time


def test_guesses_that_are_learnt_need_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would say so after half a minute; the worker does at once."""
    run = run_file(tmp_path, rollout={"engine": "vllm", "speculation": {"method": "suffix"}})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "arctic_inference" else name)
    with pytest.raises(ConfigError, match="no package arctic_inference"):
        engine_of(run)


@pytest.mark.parametrize("name, remedy", [
    ("max_model_len", "set rollout.context"), ("dtype", "set model.dtype"), ("logprobs_mode", "cannot be set"),
    ("speculative_config", "set rollout.speculation"), ("spec_method", "set rollout.speculation")])
def test_arguments_with_an_owner_are_refused(tmp_path: Path, name: str, remedy: str) -> None:
    """One owner for each setting: a second way to set it would silently win."""
    with pytest.raises(ConfigError, match=f"rollout.vllm.engine_args.{name}.*{remedy}"):
        arguments(tmp_path, cpu=True, engine_args={name: 1})


@pytest.mark.parametrize("vllm, words", [
    ({"sampling": {"top_p": 0.9}}, r'sampling.top_p = 0.9 makes.*biased_sampling = \["top_p"\]'),
    ({"sampling": {"top_k": 5, "repetition_penalty": 1.1}, "biased_sampling": ["top_k"]}, "sampling.repetition_penalty"),
    ({"all2all": "deepep_v2"}, "expert_parallel = false"), ({"data_parallel_local": 2}, "data_parallel = 1"),
    ({"data_parallel": 6, "data_parallel_local": 4}, "does not divide"),
    ({"data_parallel": 4, "data_parallel_local": 2, "adapters": "slots"}, "an engine of 2 nodes")])
def test_contradictions_and_biased_sampling_are_refused(tmp_path: Path, vllm: dict[str, Any], words: str) -> None:
    """Truncated sampling draws from another distribution than the trainer's: only for those who name what they want."""
    with pytest.raises(ConfigError, match=words):
        run_file(tmp_path, rollout={"vllm": vllm})


def test_sampling_that_is_named_is_passed_on(tmp_path: Path) -> None:
    """And a request's own: the seed fits vLLM's 63 bits and depends on where in the answer the request begins."""
    run = run_file(tmp_path, rollout={"vllm": {"sampling": {"top_p": 0.9}, "biased_sampling": ["top_p"]}})
    prompt = np.arange(60, dtype=np.int32)
    first = vllm_arguments.sampling(run, Request(prompt, 30, seed=2**64 - 1, stop_token_ids=(1,)))
    later = vllm_arguments.sampling(run, Request(prompt, 30, seed=2**64 - 1, position=3))
    assert (first["top_p"], first["max_tokens"], first["temperature"], first["stop_token_ids"]) == (0.9, 4, 1.0, [1])
    assert first["ignore_eos"] and 0 <= first["seed"] < 2**63 and first["seed"] != later["seed"]
    assert vllm_arguments.sampling(run, Request(prompt, 30, greedy=True))["temperature"] == 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_version_becomes_the_checkpoint_that_transformers_would_save(family: str, tmp_path: Path) -> None:
    """Same names, same bytes as save_pretrained: fused experts are named one by one. The folder names the model's class."""
    model = tiny(family)
    tensors = state(model)
    made = Checkpoints(files(model, SimpleNamespace(save_pretrained=lambda folder: None)), sum(t.size for t in tensors))
    try:
        path, crc32c = made.write(tensors, "1.safetensors")
        made.become(path)
        model.save_pretrained(tmp_path)
        expected, found = load_file(tmp_path / "model.safetensors"), load_file(made.folder / "model.safetensors")
        assert found.keys() == expected.keys() and all(found[k].equal(expected[k]) for k in expected)
        assert any(".experts.0." in name for name in found) == (family in MOE and family != "gpt_oss")
        assert checksum(path) == crc32c
        assert type(model).__name__ in (made.folder / "config.json").read_text()
        made.drop(path)
        assert not Path(path).exists() and (made.folder / "model.safetensors").exists()
    finally:
        made.close()
    assert not made.folder.exists()


def test_an_adapter_for_a_slot_is_a_peft_directory_behind_one_name(tmp_path: Path) -> None:
    """The base is written once and stays what an engine starts from; requests name one folder, which is always that of the
    version that serves."""
    model = tiny("llama")
    tensors = state(model)
    sent = files(model, SimpleNamespace(save_pretrained=lambda folder: None))
    layer = "model.layers.0.self_attn.q_proj"
    sent[ADAPTER_FILE] = json.dumps({"r": 4, "lora_alpha": 8, "target_modules": [layer]}).encode()
    outputs, inputs = model.get_submodule(layer).weight.shape

    def own(value: float) -> list[RawTensor]:
        shapes = {"lora_A": (4, inputs), "lora_B": (outputs, 4)}
        return [bare(f"base_model.model.{layer}.{n}.weight", torch.full(shape, value)) for n, shape in shapes.items()]

    made = Checkpoints(sent, sum(t.size for t in tensors), slots=True)
    try:
        first, _ = made.write([*tensors, *own(1.0)], "0.safetensors")
        assert made.serve_adapter(first) == made.folder / "policy" and not made.has_experts
        before = (made.folder / "model.safetensors").stat().st_ino
        second, crc32c = made.write(own(2.0), "1.safetensors")
        assert checksum(second) == crc32c
        made.become(second)
        assert (made.folder / "model.safetensors").stat().st_ino == before
        assert made.serve_adapter(second) == made.folder / "policy"
        served = load_file(made.folder / "policy" / "adapter_model.safetensors")
        assert {float(t.mean()) for t in served.values()} == {2.0} and len(served) == 2
        assert (made.folder / "policy" / ADAPTER_FILE).read_bytes() == sent[ADAPTER_FILE]
        made.drop(first)
        assert not Path(first).parent.exists() and Path(second).exists()
        for spoilt in (own(1.0)[:1], [own(1.0)[0], RawTensor(own(1.0)[1].name, "F32", (outputs, 3), bytes(12 * outputs))]):
            with pytest.raises(InvalidInput, match="q_proj"):
                made.write(spoilt, "2.safetensors")
        assert (made.adapted_layers, made.rank) == ([layer], 4)
    finally:
        made.close()


@pytest.mark.parametrize("rank, room", [(1, 1), (4, 8), (16, 16), (33, 64), (512, 512)])
def test_slots_have_room_for_the_rank(rank: int, room: int) -> None:
    """vLLM knows some ranks only; of the adapted layers it wants the last part of the name."""
    found = vllm_arguments.slot_arguments(rank, ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"])
    assert found["max_lora_rank"] == room and found["lora_target_modules"] == ["q_proj"] and found["max_loras"] == 2
    with pytest.raises(ConfigError, match="model.lora.rank = 513"):
        vllm_arguments.slot_arguments(513, [])


def test_what_a_killed_worker_left_in_shared_memory_is_removed(tmp_path: Path) -> None:
    """By the next one: folders of processes that are no more, and no others."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in (f"slipstream-vllm-{gone.pid}-abc", f"slipstream-vllm-{os.getpid()}-def", "slipstream-vllm-x-ghi", "other-1-2"):
        (tmp_path / name).mkdir()
    remove_orphans(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {f"slipstream-vllm-{os.getpid()}-def", "slipstream-vllm-x-ghi", "other-1-2"}


def test_routes_are_filed_through_the_prefix_cache_and_a_second_computation() -> None:
    """Request b begins behind a block that a computed: it takes those rows from their slots. Computed again, rows stay."""
    rows = Rows(slots=12, layers=1, experts_per_token=1)
    routes = np.arange(10, 16, dtype=np.uint8).reshape(6, 1, 1)
    blocks = [np.array([2, 0])]  # of four slots each
    rows.file(["a"], np.array([0]), np.array([6]), np.array([6]), np.array([8, 9, 10, 11, 0, 1]), routes, blocks, 4, 8)
    rows.file(["b"], np.array([4]), np.array([2]), np.array([6]), np.array([4, 5]), routes[:2] + 50, [np.array([2, 1])], 4, 8)
    rows.file(["a", "b"], np.array([0, 6]), np.array([7, 1]), np.array([7, 7]), np.array([8, 9, 10, 11, 0, 1, 2, 6]),
              np.full((8, 1, 1), 99, np.uint8), [blocks[0], np.array([2, 1])], 4, 8)
    a, b = rows.take("a"), rows.take("b")
    assert a is not None and b is not None
    assert a.ravel().tolist() == [10, 11, 12, 13, 14, 15, 99]
    assert b.ravel().tolist() == [10, 11, 12, 13, 60, 61, 99]
    assert rows.take("a") is None


def test_rows_of_rejected_guesses_make_room_for_the_tokens_that_came_instead() -> None:
    """Two tokens of prompt, then a step with three guesses of which one is accepted: the rows of the other two go, though the
    next step computes fewer positions than they took; also when the request is computed again before."""
    step = {"blocks": [np.array([0, 1])], "block_size": 4, "longest": 8}
    for again in (False, True):
        rows = Rows(slots=8, layers=1, experts_per_token=1)

        def file(first: int, routes: list[int], known: int, rows: Rows = rows) -> None:
            count = len(routes)
            rows.file(["a"], np.array([first]), np.array([count]), np.array([known]), np.arange(first, first + count),
                      np.array(routes, np.uint8).reshape(-1, 1, 1), **step)

        file(0, [10, 11], known=2)
        file(2, [12, 13, 90, 91], known=3)  # the drawn token, the accepted guess, two rejected ones
        if again:
            file(0, [70, 71, 72, 73, 14], known=5)
        else:
            file(4, [14], known=5)
        taken = rows.take("a")
        assert taken is not None and taken.ravel().tolist() == [10, 11, 12, 13, 14]


def test_rows_of_logits_get_the_temperatures_of_their_requests() -> None:
    """What vLLM's own function does on a GPU: each request's value once for each of its rows, none for one without, in its
    dtype; 0, which means greedy, becomes 1."""
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    found = vllm_temperatures.expanded(torch.tensor([0.7, 9.0, 0.0, 1.5]), ends, 6, replace_from=0, replace_to=1)
    assert found.tolist() == torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0, 1.5]).tolist() and found.dtype == torch.float32
    assert vllm_temperatures.expanded(torch.tensor([5, 6, 7, 8], dtype=torch.int32), ends, 6).dtype == torch.int32


def test_judged_guesses_are_counted() -> None:
    """In sums since the start, beside what else the scheduler says."""
    signals = Signals()
    signals.judged(2, 8, 3)
    signals.judged(1, 4, 0)
    assert signals.load(0).drafts == Drafts(made=3, tokens=12, accepted=3) and Signals().load(0).drafts == Drafts()


def test_spans_of_pieces_and_of_the_same_version_twice() -> None:
    """Exchanges 4 and 5 loaded the same version, 6 another: a piece from token 2 on has what is left of each."""
    versions = {4: PolicyVersion(number=1), 5: PolicyVersion(number=1), 6: PolicyVersion(number=2, step=1)}
    logprobs = SimpleNamespace(logprobs=[-1.0, -2.0, -9.0, -3.0], start_indices=[0, 1, 3])
    piece = SimpleNamespace(token_ids=[7, 8, 9], logprobs=logprobs, finish_reason="stop")
    found = generation(piece, 2, [("4", 0), ("5", 3), ("6", 4)], versions)
    assert found.spans == (Span(1, 0, 0, 2), Span(2, 1, 0, 1)) and found.finish_reason == FINISH_STOP
    assert found.logprobs.tolist() == [-1.0, -2.0, -3.0]


def test_a_stream_goes_on_behind_what_it_has_sent() -> None:
    """With another vLLM: the tokens sent are part of its prompt, and its draws are those of the later positions."""
    request = Request(np.array([1, 2], np.int32), 10, seed=3, position=4)
    sent = [Generation(np.array([5], np.int32), np.zeros(1, np.float32), (), 0)] * 3
    later = rest(request, sent)
    assert later.prompt.tolist() == [1, 2, 5, 5, 5] and (later.max_new_tokens, later.position) == (7, 7)
    assert later.id == request.id and rest(request, []) is request
    assert Asked(request, None, 0).pieces.empty()
