"""Policy versions as patches of the one before: the same tensors come out, from any place in the chain, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from slipstream.errors import InvalidInput, NotFound
from slipstream.manifest import (
    Held,
    Manifest,
    RawTensor,
    read_manifest,
    read_tensors,
    weights_digest,
    weights_hash,
    write_version,
)
from slipstream.objects import FileStore, ObjectStore

SIZE = 4000


def _weights(step: int) -> list[RawTensor]:
    """bfloat16 weights of which one element in a hundred moves by an ulp a step; a small tensor that changes altogether."""
    random = np.random.default_rng(0)
    bits = random.integers(0x3C00, 0x3F80, SIZE).astype("<u2")
    for k in range(step):
        moved = np.random.default_rng(k + 1).random(SIZE) < 0.01
        bits = np.where(moved, bits + 1, bits).astype("<u2")
    return [
        RawTensor("experts", "BF16", (40, 100), bits.tobytes()),
        RawTensor("norm", "F32", (8,), np.full(8, step, "<f4").tobytes())]


async def _chain(store: ObjectStore, length: int) -> list[Held]:
    """Versions 10, 11, ...: the first complete, each other a patch of the one before."""
    chain: list[Held] = []
    for step in range(length):
        version = await write_version(
            store, run="demo", number=10 + step, step=step, incarnation=1, tensors=_weights(step), files={},
            parent=chain[-1] if chain else None)
        chain.append(Held(version, _weights(step), 10))
    return chain


async def _read(store: ObjectStore, of: Held, held: Held | None = None) -> tuple[Manifest, Sequence[RawTensor]]:
    manifest = await read_manifest(store, of.version, "demo")
    return manifest, await read_tensors(store, manifest, held)


def _contents(tensors: Sequence[RawTensor]) -> dict[str, bytes]:
    return {t.name: bytes(t.data) for t in tensors}


async def test_every_reader_gets_the_weights(tmp_path: Path) -> None:
    """With the parent in memory, with an older version, and with nothing: late joiners read the chain from its start."""
    store = FileStore(tmp_path)
    chain = await _chain(store, 4)
    for held in (chain[2], chain[1], None):
        manifest, tensors = await _read(store, chain[3], held)
        assert _contents(tensors) == _contents(_weights(3))
    assert manifest.parent == chain[2].version and manifest.full == 10
    assert {t.name: t.patched for t in manifest.tensors} == {"experts": True, "norm": False}
    assert weights_hash(manifest.tensors) == weights_digest(_weights(3))
    sizes = [(tmp_path / "versions" / f"{10 + n:08d}-1" / "model.safetensors").stat().st_size for n in (0, 3)]
    assert sizes[1] < 0.1 * sizes[0]


async def test_what_changed_altogether_is_complete_again(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    first = (await _chain(store, 1))[0]
    other = [RawTensor("experts", "BF16", (40, 100), bytes(2 * SIZE))]
    version = await write_version(store, run="demo", number=11, step=1, incarnation=1, tensors=other, files={}, parent=first)
    manifest, tensors = await _read(store, Held(version, other))
    assert manifest.parent is None and manifest.full == 11 and _contents(tensors) == _contents(other)


@pytest.mark.parametrize("number", [10, 11, 12])
async def test_damage_anywhere_in_the_chain_is_found(tmp_path: Path, number: int) -> None:
    store = FileStore(tmp_path)
    chain = await _chain(store, 3)
    path = tmp_path / "versions" / f"{number:08d}-1" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-40 if number == 10 else -20] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(InvalidInput):
        await _read(store, chain[2])


async def test_a_wrong_parent_in_memory_is_found(tmp_path: Path) -> None:
    """The number alone is not believed: what a patch rebuilds has to have its checksum."""
    store = FileStore(tmp_path)
    chain = await _chain(store, 3)
    with pytest.raises(InvalidInput, match="not what its patch was made for"):
        await _read(store, chain[2], Held(chain[1].version, _weights(0)))
    with pytest.raises(InvalidInput, match="lacks tensor experts"):
        await _read(store, chain[2], Held(chain[1].version, _weights(1)[1:]))


async def test_a_missing_ancestor_is_not_found(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    chain = await _chain(store, 3)
    await store.delete(chain[1].version.manifest_key)
    with pytest.raises(NotFound):
        await _read(store, chain[2])
    assert (await _read(store, chain[2], chain[1]))[1]
