"""Ask the model of a run: `slipstream generate` starts this as `python -m services.rollout.generate --folder FOLDER -- TEXT`.

Which model answers, the first that there is:
    a rollout worker of the run, over RolloutService.Generate, while the run is alive
    <folder>/model, the trained model that the trainer leaves at the end; of an adapter <folder>/model/merged, if it is there
    the newest policy version in the object store, of a run that was interrupted
Prints one answer a line, without the prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from slipstream import auth_credentials, rpc, seeds
from slipstream.auth_credentials import Credentials
from slipstream.config import RunFile, load
from slipstream.errors import ConfigError, NotFound, SlipstreamError, Unavailable, from_rpc_error
from slipstream.manifest import Manifest, checksum, read_complete, read_files, read_manifest
from slipstream.objects import ObjectStore, open_store
from slipstream.protos.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from slipstream.protos.types.v1 import policy_pb2, tensor_pb2

ANSWER_S = 600.0  # deadline of one answer of a worker


def main() -> int:
    """Print the answers; the exit code."""
    parser = argparse.ArgumentParser(description="Ask the model of a run.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=0, help="0 = rollout.max_new_tokens of the run")
    parser.add_argument("--n", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", action="store_true", help="draw tokens instead of taking the most probable")
    parser.add_argument("--chat", action="store_true", help="put the prompt through the chat template")
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("text")
    asked = parser.parse_args()
    try:
        run = load(asked.folder / "run.json")
        asked.max_new_tokens = asked.max_new_tokens or run.rollout.max_new_tokens
        found = asyncio.run(answers(run, asked))
        print("\n".join(found))
        if empty := sum(not answer for answer in found):
            print(f"slipstream: {empty} of {len(found)} answers are empty: the model ended at once; is TEXT of the form "
                  "that it was trained on?", file=sys.stderr)
    except ModuleNotFoundError as error:
        print(f"slipstream: {error.name} is not installed: pip install 'slipstream[torch]'", file=sys.stderr)
        return 2
    except SlipstreamError as error:
        if asked.debug:
            raise
        print(f"slipstream: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | NotFound) else 1
    return 0


async def answers(run: RunFile, asked: argparse.Namespace) -> list[str]:
    """Answers of the first model that there is. Raises NotFound when there is none yet."""
    credentials = auth_credentials.of_folder(asked.folder, "cli")
    workers = [json.loads(p.read_text())["address"] for p in sorted((asked.folder / "services").glob("rollout-*.json"))]
    places = (asked.folder / "model", asked.folder / "model" / "merged")
    left = next((place for place in places if (place / "config.json").exists()), None)
    async with open_store(run.objects_url, run.objects.endpoint, run.objects.region) as store:
        if workers and (manifest := await newest(store)):
            try:
                return await from_worker(workers[0], credentials, await read_files(store, manifest), asked)
            except Unavailable:
                if left is None:
                    raise
        if left is not None:
            return from_folder(left, asked)
        if manifest := await newest(store):
            return await from_version(store, manifest, asked)
    raise NotFound(
        f"{run.run.name} has no model yet: neither {asked.folder / 'model'} nor a policy version in {run.objects_url}; "
        "wait until its trainer has published the first")


async def newest(store: ObjectStore) -> Manifest | None:
    """The manifest of the highest publication number."""
    keys = [key for key in await store.list("versions/") if key.endswith("/manifest.json")]
    for key in reversed(keys):
        try:
            text = await store.get(key)
            told = json.loads(text)
            return await read_manifest(store, policy_pb2.PolicyVersion(
                number=told["number"], step=told["step"], incarnation=told["incarnation"], manifest_key=key,
                manifest_crc32c=checksum(text)))
        except NotFound:  # deleted since it was listed
            continue
    return None


async def from_worker(
    address: str, credentials: Credentials, files: Mapping[str, bytes], asked: argparse.Namespace,
) -> list[str]:
    """Ask a rollout worker: tokens in, tokens out."""
    quiet()
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = np.asarray(encode(tokenizer, asked), np.int32)
    stops = stop_ids(tokenizer, json.loads(files.get("generation_config.json", b"{}")).get("eos_token_id"))
    async with rpc.channel(address, credentials=credentials, peer="rollout") as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)

        async def one(index: int) -> str:
            tokens: list[int] = []
            request = rollout_pb2.GenerateRequest(
                prompt=tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=[len(prompt)], data=prompt.tobytes()),
                max_new_tokens=asked.max_new_tokens, temperature=1.0, greedy=not asked.sample, stop_token_ids=stops,
                seed=seeds.stream(asked.seed, "generate", index))
            try:
                async for piece in stub.Generate(request, timeout=ANSWER_S):
                    tokens += np.frombuffer(piece.tokens.data, np.int32).tolist()
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None
            return tokenizer.decode(tokens, skip_special_tokens=True)

        return list(await asyncio.gather(*(one(i) for i in range(asked.n))))


def from_folder(folder: Path, asked: argparse.Namespace) -> list[str]:
    """Ask a Hugging Face model directory."""
    quiet()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return continued(AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder), asked)


async def from_version(store: ObjectStore, manifest: Manifest, asked: argparse.Namespace) -> list[str]:
    """Ask a policy version."""
    quiet()
    from slipstream.model import assembled

    model, tokenizer, _ = assembled(await read_files(store, manifest), await read_complete(store, manifest))
    return continued(model, tokenizer, asked)


def continued(model: Any, tokenizer: Any, asked: argparse.Namespace) -> list[str]:
    """Answers of a transformers model in this process."""
    import torch

    prompt = torch.tensor([encode(tokenizer, asked)])
    torch.manual_seed(seeds.stream(asked.seed, "generate") & (2**63 - 1))
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if asked.sample else {"do_sample": False}
    stops = stop_ids(tokenizer, getattr(model.generation_config, "eos_token_id", None))
    with torch.inference_mode():
        out = model.generate(
            prompt.repeat(asked.n, 1), attention_mask=torch.ones_like(prompt).repeat(asked.n, 1), **how,
            max_new_tokens=asked.max_new_tokens, eos_token_id=stops or None,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(stops), None))
    return tokenizer.batch_decode(out[:, prompt.shape[1]:], skip_special_tokens=True)


def quiet() -> None:
    """Only the answers are printed: no progress bars, no advice."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def encode(tokenizer: Any, asked: argparse.Namespace) -> list[int]:
    """Token ids of the prompt, as an episode makes them. Raises ConfigError when the tokenizer cannot."""
    try:
        if asked.chat:
            return tokenizer.apply_chat_template(
                [{"role": "user", "content": asked.text}], add_generation_prompt=True, tokenize=True, return_dict=False)
        ids = tokenizer.encode(asked.text, add_special_tokens=False)
    except Exception as error:  # tokenizers raise bare Exception for what is not in their vocabulary
        raise ConfigError(f"the tokenizer of this model cannot encode {asked.text!r} ({error}): use its alphabet") from None
    if not ids:
        raise ConfigError("TEXT is empty: give the model something to go on from")
    return ids


def stop_ids(tokenizer: Any, generation: int | Sequence[int] | None) -> list[int]:
    """Ids that end an answer: the tokenizer's EOS and those of the generation configuration."""
    more = [generation] if isinstance(generation, int) else list(generation or ())
    return sorted({*more, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])})


if __name__ == "__main__":
    sys.exit(main())
