"""What it costs to move weights: patches, publication, loading, the pause of a swap.

    python -m benchmarks.swap --json FILE [--rounds 5]

On a model of SmolLM2-135M's shape (30 layers of width 576, vocabulary 49,152, tied embeddings; 269 MB in bfloat16), weights at
random, trained with AdamW at a learning rate of 1e-6 on float32 masters. Ratios of paired rounds, medians:

patch_share             bytes of a version written as a patch of the one before, over those of a complete one
load_over_memcpy        time to copy as many bytes from memory to memory, over the time to load a fetched version
publish_to_swap_over_copy   time to write the bytes durably to a file, read them back and copy them, over the time from the
                        trainer's tensors to an engine that has loaded and proved them: manifest, checksums, probes
patched_over_complete   the same way for a version that is a patch, over a complete one: what a patch saves or costs on a local
                        disk; over a network it moves `patch_share` of the bytes
s3_put_over_obstore     time of obstore (Rust) to put an object over TLS into a sink that forgets it, over ours; if installed
s3_put_over_obstore_cpu   the same in CPU time of the client
pause_*_ms              how long decoding stands still for a swap on the demo's model, by policy of the KV cache
tax_*                   tokens per second without swaps over those with a swap every 32 decode steps
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import shutil
import ssl
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web

from benchmarks.record import publish
from services.rollout.decoder import Decoder
from services.rollout.engine import Request
from services.rollout.proof import prove_version
from services.trainer.learner import Learner
from services.trainer.packing import Row
from slipstream import config, patch, rpc
from slipstream.manifest import Held, RawTensor, read_manifest, read_tensors, write_version
from slipstream.model import assembled, state
from slipstream.objects import FileStore
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion

SMOLLM2 = {
    "model_type": "llama", "tokenizer_chars": "0123456789",
    "config": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "tie_word_embeddings": True, "initializer_range": 1 / 24, "max_position_embeddings": 2048}}
DEMO = Path("examples/sort-digits/run.toml")
STEPS, TOKENS = 6, 64  # training steps of which the last half is measured; tokens of each
SINK_BYTES = 64 << 20


def _run(build: dict[str, Any], dtype: str, **trainer: Any) -> config.RunFile:
    return config.parse({
        "run": {"name": "swap"}, "model": {"build": build, "dtype": dtype},
        "environments": [{"name": "e", "entry": "slipstream.environments.sort_digits:SortDigits"}],
        "trainer": {"threads": 0, **trainer}})


def _trained(learner: Learner) -> list[list[RawTensor]]:
    """The weights after each of STEPS steps of AdamW on random tokens."""
    versions = []
    for step in range(STEPS):
        tokens = np.random.default_rng(step).integers(0, learner.vocabulary, TOKENS + 1).astype(np.int32)
        learner.supervised_step([_row(tokens)], learner.run.trainer.learning_rate, f"step {step}")
        versions.append(learner.weights())
    return versions


def _row(tokens: np.ndarray) -> Row:
    """A row of which every token but the first is trained."""
    size = len(tokens) - 1
    return Row(tokens[:-1], np.arange(size), tokens[1:], np.zeros(size, np.float32), np.zeros(size, np.int64))


def _shares(versions: Sequence[Sequence[RawTensor]]) -> dict[str, float]:
    """Bytes and speed of patches between the later versions."""
    whole, patched, encoding, decoding = 0, 0, 0.0, 0.0
    for old, new in zip(versions[STEPS // 2 - 1:], versions[STEPS // 2:], strict=False):
        for before, after in zip(old, new, strict=True):
            started = time.perf_counter()
            made = patch.encode(before.data, after.data, after.dtype)
            encoding += time.perf_counter() - started
            assert made is not None
            started = time.perf_counter()
            assert patch.decode(before.data, made, after.dtype) == bytes(after.data)
            decoding += time.perf_counter() - started
            whole += after.size
            patched += len(made)
    return {"patch_share": patched / whole, "encode_gb_s": whole / encoding / 1e9, "decode_gb_s": whole / decoding / 1e9}


def _timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _loading(decoder: Decoder, versions: Sequence[Sequence[RawTensor]], rounds: int) -> dict[str, float]:
    """Loading what was fetched against copying as many bytes, tensor by tensor."""
    fetched = [[RawTensor(t.name, t.dtype, t.shape, bytes(t.data)) for t in tensors] for tensors in versions[-2:]]
    sources = [torch.frombuffer(bytearray(t.data), dtype=torch.uint8) for t in fetched[0]]
    targets = [torch.empty_like(s) for s in sources]
    ratios = []
    for n in range(rounds):
        copying = _timed(lambda: [t.copy_(s) for t, s in zip(targets, sources, strict=True)])
        version = PolicyVersion(number=n + 1)
        loading = _timed(lambda: decoder.load(fetched[n % 2], version))  # noqa: B023
        ratios.append(copying / loading)
    return {"load_over_memcpy": statistics.median(ratios)}


async def _publishing(
    folder: Path, learner: Learner, decoder: Decoder, versions: Sequence[Sequence[RawTensor]], rounds: int,
) -> dict[str, float]:
    """From tensors to a proved engine, complete and as a patch, against the plain way of the same bytes through a file."""
    store, probes = FileStore(folder), learner.probes()
    latest, former = versions[-1], versions[-2]
    ratios, patched = [], []

    async def way(number: int, parent: Held | None) -> float:
        started = time.perf_counter()
        version = await write_version(
            store, run="swap", number=number, step=number, incarnation=1, tensors=latest, files={}, parent=parent,
            probes=probes)
        manifest = await read_manifest(store, version, "swap")
        tensors = await read_tensors(store, manifest, parent)
        decoder.load(tensors, version, lambda: prove_version(decoder, tensors, probes))
        return time.perf_counter() - started

    for n in range(rounds):
        copying = _timed(lambda: _through_a_file(folder / f"plain-{n}", latest))  # noqa: B023
        held = Held(await write_version(
            store, run="swap", number=3 * n + 1, step=0, incarnation=1, tensors=former, files={}), former, 3 * n + 1)
        complete = await way(3 * n + 2, None)
        ratios.append(copying / complete)
        patched.append(await way(3 * n + 3, held) / complete)
    return {"publish_to_swap_over_copy": statistics.median(ratios), "patched_over_complete": statistics.median(patched)}


def _through_a_file(path: Path, tensors: Sequence[RawTensor]) -> None:
    with path.open("wb") as file:
        for tensor in tensors:
            file.write(tensor.data)
        file.flush()
        os.fsync(file.fileno())
    bytearray(path.read_bytes())
    path.unlink()


def _swapping(rounds: int) -> dict[str, float]:
    """Decoding of the demo's model with and without swaps."""
    run = config.load(DEMO)
    learner = Learner(run)
    files, tensors, probes = learner.files(), learner.weights(), learner.probes()
    figures: dict[str, float] = {}
    for policy in ("keep", "recompute"):
        model, _, _ = assembled(files, tensors, run.model.dtype, "grouped_mm")
        decoder = Decoder(model, run.rollout.slots, run.rollout.context, recompute_on_swap=policy == "recompute")
        pauses: list[float] = []

        def decoding(every: int, decoder: Decoder = decoder, pauses: list[float] = pauses) -> float:
            """Tokens per second of 96 steps of a full batch."""
            decoder.waiting.extend(Request(np.array([3, 4, 5], np.int32), 100, seed=i) for i in range(decoder.slots))
            before, started = decoder.generated_tokens, time.perf_counter()
            for step in range(1, 97):
                decoder.step()
                if every and step % every == 0:
                    version = PolicyVersion(number=step)
                    pauses.append(_timed(
                        lambda: decoder.load(tensors, version, lambda: prove_version(decoder, tensors, probes))))  # noqa: B023
            rate = (decoder.generated_tokens - before) / (time.perf_counter() - started)
            decoder.abort([r.id for r in decoder.rows.requests] + [r.id for r in decoder.waiting])
            return rate

        taxes = [decoding(0) / decoding(32) for _ in range(rounds)]
        figures |= {f"pause_{policy}_ms": 1000 * statistics.median(pauses), f"tax_{policy}": statistics.median(taxes)}
    return figures


def _self_signed(folder: Path) -> tuple[Path, Path]:
    """(certificate, key) of 127.0.0.1"""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run([
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=localhost",
        "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


def _serve(certificate: Path, key: Path, told: Connection) -> None:
    """An S3 endpoint with TLS, as S3 has it, that takes objects and forgets them; tells its port."""
    async def take(request: web.Request) -> web.Response:
        async for _ in request.content.iter_any():
            pass
        if "uploads" in request.query:
            text = "<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
        elif request.method == "POST":
            text = "<CompleteMultipartUploadResult><ETag>1</ETag></CompleteMultipartUploadResult>"
        else:
            text = ""
        return web.Response(text=text, headers={"ETag": '"1"'}, content_type="application/xml")

    async def serve() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        app = web.Application(client_max_size=1 << 34)
        app.router.add_route("*", "/{path:.*}", take)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        told.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())


@contextlib.contextmanager
def _sink() -> Iterator[str]:
    """The address of a sink in a process of its own: both clients have their own interpreter lock to themselves."""
    folder = Path(tempfile.mkdtemp())
    certificate, key = _self_signed(folder)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(certificate, key, there), daemon=True)
    process.start()
    os.environ["AWS_CA_BUNDLE"] = str(certificate)
    try:
        yield f"https://127.0.0.1:{here.recv()}"
    finally:
        del os.environ["AWS_CA_BUNDLE"]
        process.kill()
        process.join()
        shutil.rmtree(folder)


async def _putting(rounds: int) -> dict[str, float]:
    """Our S3 store against obstore's, whole objects of SINK_BYTES into the sink."""
    try:
        from obstore.store import S3Store as Obstore
    except ImportError:
        return {}
    from slipstream.s3 import open_s3

    os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    data, ratios, of_cpu = os.urandom(SINK_BYTES), [], []
    async with contextlib.AsyncExitStack() as stack:
        endpoint = stack.enter_context(_sink())
        ours = await stack.enter_async_context(open_s3("bucket", "", endpoint, "us-east-1"))
        theirs = Obstore("bucket", endpoint=endpoint, region="us-east-1", unsigned_payload=True,
                         client_options={"allow_invalid_certificates": True})
        for n in range(-1, 2 * rounds):  # the first is for connections
            started, used = time.perf_counter(), time.process_time()
            await theirs.put_async(f"object-{n}", data)
            middle, used_half = time.perf_counter(), time.process_time()
            await ours.put(f"object-{n}", data)
            if n >= 0:
                ratios.append((middle - started) / (time.perf_counter() - middle))
                of_cpu.append((used_half - used) / (time.process_time() - used_half))
    return {"s3_put_over_obstore": statistics.median(ratios), "s3_put_over_obstore_cpu": statistics.median(of_cpu)}


async def measure(rounds: int) -> dict[str, Any]:
    """All figures."""
    learner = Learner(_run(SMOLLM2, "bfloat16", learning_rate=1e-6))
    versions = _trained(learner)
    figures: dict[str, Any] = _shares(versions)
    files = learner.files()
    model, _, _ = assembled(files, versions[-1], "bfloat16")
    decoder = Decoder(model, 4, 64)
    figures |= _loading(decoder, versions, rounds)
    with tempfile.TemporaryDirectory() as folder:
        figures |= await _publishing(Path(folder), learner, decoder, versions, rounds)
    figures["bytes"] = sum(t.size for t in state(model))
    return {**figures, **_swapping(rounds), **await _putting(rounds)}


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    figures = rpc.run(measure(arguments.rounds))  # on the loop that services run on
    rows = [[name, f"{value:.3f}" if isinstance(value, float) else str(value)] for name, value in figures.items()]
    publish("weights on the move", ["figure", "value"], rows, figures, arguments.json)


if __name__ == "__main__":
    main()
