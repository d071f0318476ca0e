"""vLLM's life beside this process: started from a checkpoint, given others, proved, ended. Knows nothing of our requests."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from services.rollout import vllm_arguments
from services.rollout.engine import Request
from services.rollout.group import Group
from services.rollout.vllm_checkpoint import Checkpoints, checksum
from services.rollout.vllm_signals import Signals, logger
from slipstream.config import RunFile
from slipstream.errors import InvalidInput, Unavailable
from slipstream.probes import Probes
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion

SHUTDOWN_S = 2.0  # it never ends by itself
PROOF_TOKENS, PROOF_PROMPT = 4, 8
SERVING, TRIED = ("policy", 1), ("next", 2)  # name and number of an adapter in its slot
_scored = itertools.count()  # no cached block of an earlier probe serves a later one


class VllmProcess:
    """One AsyncLLM at a time. `shape` is the model's configuration; `extension` the class that runs in the worker."""

    def __init__(
        self, run: RunFile, checkpoints: Checkpoints, shape: Mapping[str, Any], extension: str, signals: Signals,
        observe: Callable[[float], None] | None, group: Group | None = None,
    ) -> None:
        self._group = group
        self._run, self._checkpoints, self._shape, self._extension = run, checkpoints, shape, extension
        self._signals, self._observe = signals, observe
        self.lora: Any = None  # the adapter in its slot, as requests name it; None without slots
        self.llm: Any = None
        self.life = 0  # counts the times that everything in flight was forgotten

    async def start(self, path: str, exchange: int) -> None:
        """Start with the checkpoint at `path`, whose tokens are stamped `exchange`.

        Raises InvalidInput for a model or an argument that cannot run, Unavailable when its process does not come up.
        """
        self._checkpoints.become(path)
        run = self._run
        os.environ.update(vllm_arguments.environment(run, cpu=False))
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        cpu = current_platform.is_cpu()
        os.environ.update(vllm_arguments.environment(run, cpu))
        arguments = vllm_arguments.engine_arguments(run, str(self._checkpoints.folder), self._shape, self._extension, cpu)
        if self._checkpoints.slots:
            self._may_use_slots(cpu)
            arguments |= vllm_arguments.slot_arguments(self._checkpoints.rank, self._checkpoints.adapted_layers)
        launching = None
        if self._group is not None:
            address = socket.gethostbyname(socket.gethostname())
            arguments |= vllm_arguments.node_arguments(run, 0, address, run.rollout.vllm.group_port)
            launch = self._group.launch(address, run.rollout.vllm.group_port)
            launching = asyncio.create_task(launch, name="launch the other nodes")
        loggers = [logger(self._signals, self._observe)]
        try:
            self.llm = await asyncio.to_thread(
                AsyncLLM.from_engine_args, AsyncEngineArgs(**arguments, disable_log_stats=True), stat_loggers=loggers)
            if launching is not None:
                await launching
            if run.rollout.capture_routes and cpu:
                await self.call("slipstream_capture")
            if run.rollout.speculation.method != "off":
                await self.call("slipstream_prove_temperatures")
            await self._take_adapter(path)
            await self.llm.update_weight_version(str(exchange))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise InvalidInput(f"vLLM cannot run this model: {' '.join(str(error).split())[:400]}", "MODEL") from error
        except (RuntimeError, OSError) as error:  # memory, ports, a killed process: another try may do
            raise Unavailable(f"vLLM did not start: {' '.join(str(error).split())[:400]}", "ENGINE_START", retry_s=5) from error

    async def stop(self) -> None:
        """End it, whatever it is doing. Idempotent."""
        self.life += 1
        llm, self.llm = self.llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, SHUTDOWN_S)

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """A method of the worker extension, between two steps: the results of all workers."""
        return await self.llm.collective_rpc(method, args=arguments)

    async def _ask(self, name: str, prompt: Any, params: Any, lora: Any = None, replica: int | None = None) -> Any:
        return await self.llm.add_request(
            name, prompt, params, lora_request=lora or self.lora, data_parallel_rank=replica)

    def _may_use_slots(self, cpu: bool) -> None:
        """Raises InvalidInput where slots cannot work."""
        if self._checkpoints.adapts_experts:
            raise InvalidInput(
                "rollout.vllm.adapters = slots with an adapter on fused experts: those are adapted in the weights only; set "
                'adapters = "merged", or leave experts out of model.lora.targets', "SLOTS")
        if cpu and self._checkpoints.has_experts:
            raise InvalidInput(
                "rollout.vllm.adapters = slots on a CPU with a model that has experts: vLLM runs those on Triton kernels once "
                'slots are on, which a CPU lacks; set adapters = "merged"', "SLOTS")

    async def _take_adapter(self, path: str) -> None:
        """Let the adapter at `path` be the one that all requests name, those in flight included. Nothing without slots."""
        if not self._checkpoints.slots:
            return
        from vllm.lora.request import LoRARequest

        folder = str(self._checkpoints.serve_adapter(path))
        self.lora = LoRARequest(SERVING[0], SERVING[1], folder)
        await self.llm.add_lora(LoRARequest(SERVING[0], SERVING[1], folder, load_inplace=True))
        await self.llm.pin_lora(SERVING[1])  # were it thrown out, a request of old would load it again

    async def spread(self, version: PolicyVersion, path: str, crc32c: int) -> None:
        """Let each node of the engine hold the checkpoint at `path` as it is here. Raises as Group.prepare."""
        if self._group is not None:
            await self._group.prepare(version, self._checkpoints.folder, Path(path).name, crc32c)

    def drop(self, path: str) -> None:
        """Delete a checkpoint that nobody goes back to, on each node."""
        self._checkpoints.drop(path)
        if self._group is not None:
            self._group.forget(Path(path).name)

    async def go_back(self, path: str, exchange: int) -> None:
        """Serve the checkpoint at `path`, after a load that went wrong; what was in flight is forgotten.

        A new start; an engine of several nodes loads it again on all of them instead: they cannot start one by one.
        """
        if self._group is None:
            await self.stop()
            await self.start(path, exchange)
            return
        self.life += 1
        await self.llm.pause_generation(mode="abort", clear_cache=True)
        await self.call("slipstream_load", path)
        await self.llm.update_weight_version(str(exchange))
        await self.llm.resume_generation()

    async def sleep(self) -> None:
        """Free the devices' memory between two steps: weights go to host memory, the cache is dropped. Requests in flight stay,
        and are computed anew when it wakes; others wait in vLLM's queue. On a CPU vLLM pauses and frees nothing.
        """
        await self.llm.sleep(level=1, mode="keep")

    async def wake(self) -> None:
        """Go on where it slept, with the same weights."""
        await self.llm.wake_up()

    async def trial(self, path: str, probes: Probes | None) -> None:
        """An adapter proves itself in the second slot while the first serves. Raises InvalidInput (CANARY); nothing has changed
        then. Whole models have no second place: they are scored after the load."""
        if not self._checkpoints.slots:
            return
        from vllm.lora.request import LoRARequest

        lora = LoRARequest(TRIED[0], TRIED[1], str(Path(path).parent), load_inplace=True)
        try:
            await self.llm.add_lora(lora)
            await self.score(probes, lora)
        finally:
            await self.llm.remove_lora(TRIED[1])

    async def load(self, path: str, exchange: int, recompute: bool, before_resume: Callable[[], None] = lambda: None) -> None:
        """Pause, load a verified checkpoint, stamp tokens with `exchange` from here on, resume.

        When this raises the model may be between two versions and decoding stands still: `stop` and `start` are what is left.
        """
        await self.llm.pause_generation(mode="keep", clear_cache=recompute)
        if self._checkpoints.slots:
            await self._take_adapter(path)
        else:
            await self.call("slipstream_load", path)
        await self.llm.update_weight_version(str(exchange))
        before_resume()
        await self.llm.resume_generation()

    async def prove(self, path: str, exchange: int) -> None:
        """Loading the weights that are there must change no bit. Raises InvalidInput when it does.

        It did with the experts of vLLM 0.32 on CPUs, which `vllm_moe_reload` mends, and may in versions that nobody has tried.
        """
        before = await self._probe("before")
        await self.call("slipstream_verify", path, await asyncio.to_thread(checksum, path))
        await self.load(path, exchange, recompute=True)
        after = await self._probe("after")
        if before != after:
            raise InvalidInput(
                f"vLLM gives other log-probabilities after loading the same weights again ({before} and {after}): policy "
                'versions would not be what they say; use another version of vLLM, or rollout.engine = "torch"', "RELOAD")
        self._signals.generated_tokens = self._signals.prompt_tokens = 0

    async def score(self, probes: Probes | None, lora: Any = None) -> None:
        """The canary: raises InvalidInput (CANARY) when the trainer's model scores the probes otherwise than this one."""
        if probes is None:
            return
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        size = min(probes.tokens.shape[1], self._run.rollout.context - 1)
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        replicas = range(self._run.rollout.vllm.data_parallel)  # each holds weights of its own
        for replica in replicas if len(replicas) > 1 else (None,):
            await self._score(probes, size, params, lora, replica)

    async def _score(self, probes: Probes, size: int, params: Any, lora: Any, replica: int | None) -> None:
        from vllm.inputs.engine import tokens_input

        collectors = [
            await self._ask(
                f"canary-{i}", tokens_input(tokens.tolist(), cache_salt=f"canary-{next(_scored)}"), params, lora, replica)
            for i, tokens in enumerate(probes.tokens[:, :size])]
        found = np.zeros((len(collectors), size - 1))
        for i, collector in enumerate(collectors):
            output = await collector.get()
            for t, (token, entry) in enumerate(zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)):
                found[i, t] = entry[token].logprob
            if self._run.rollout.capture_routes:
                await self.call("slipstream_routes", [collector.request_id])
        dataclasses.replace(probes, tokens=probes.tokens[:, :size], logprobs=probes.logprobs[:, : size - 1]).judge(
            found, self._run.model.dtype)

    async def _probe(self, name: str) -> list[list[float]]:
        """Log-probabilities of two short greedy answers, asked one after the other."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        found, vocabulary = [], int(self._shape["vocab_size"])
        size = max(1, min(PROOF_PROMPT, self._run.rollout.context - PROOF_TOKENS))
        for i in range(2):
            prompt = (np.arange(i + 1, i + 1 + size) % vocabulary).astype(np.int32)
            arguments = vllm_arguments.sampling(self._run, Request(prompt, PROOF_TOKENS, greedy=True))
            params = SamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY)
            collector = await self._ask(f"proof-{name}-{i}", tokens_input(prompt.tolist(), cache_salt=name), params)
            found.append(list((await collector.get()).outputs[0].logprobs.logprobs))
        return found
