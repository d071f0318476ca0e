"""Policy versions in the object store: what is read is what was written, or an error that says which part is not."""

import json

import numpy as np
import pytest
import safetensors

from slipstream.errors import Conflict, InvalidInput, NotFound
from slipstream.manifest import RawTensor, checksum, delete_version, read_files, read_manifest, read_tensors, write_version
from slipstream.objects import FileStore
from slipstream.protos.types.v1 import policy_pb2

WEIGHT = np.arange(12, dtype="<f4").reshape(3, 4)
TENSORS = [
    RawTensor("norm", "BF16", (5,), bytes(range(10))),
    RawTensor("experts", "F32", (3, 4), memoryview(WEIGHT)),  # pyright: ignore[reportArgumentType]
    RawTensor("empty", "F32", (0, 4), b""),
    RawTensor("scalar", "I64", (), (7).to_bytes(8, "little")),
]
FILES = {"config.json": b'{"model_type": "tiny"}', "tokenizer.json": b"{}"}


@pytest.fixture
def store(tmp_path):
    return FileStore(tmp_path)


async def publish(store, number=7, step=6, **changes):
    wanted = {"run": "demo", "number": number, "step": step, "incarnation": 2, "tensors": TENSORS, "files": FILES}
    return await write_version(store, **wanted | changes)


async def load(store, version):
    """Everything a rollout worker reads before it swaps."""
    manifest = await read_manifest(store, version, "demo")
    return await read_tensors(store, manifest), await read_files(store, manifest)


async def test_round_trip(store):
    """Names, types, shapes, bytes and files come back; the version names the manifest and its checksum."""
    version = await publish(store)
    assert version.manifest_key == "versions/00000007-2/manifest.json"
    assert (version.number, version.step, version.incarnation) == (7, 6, 2)
    tensors, files = await load(store, version)
    want = {t.name: (t.dtype, t.shape, bytes(t.data)) for t in TENSORS}
    assert {t.name: (t.dtype, t.shape, bytes(t.data)) for t in tensors} == want
    assert files == FILES


async def test_the_tensor_object_is_a_safetensors_file(store, tmp_path):
    """The safetensors library opens it, and every tensor starts at a multiple of its element size."""
    version = await publish(store)
    path = tmp_path / "versions" / "00000007-2" / "model.safetensors"
    with safetensors.safe_open(path, "np") as file:
        assert sorted(file.keys()) == sorted(t.name for t in TENSORS)
        assert np.array_equal(file.get_tensor("experts"), WEIGHT)
        assert file.metadata() == {"format": "pt", "run": "demo", "step": "6"}
    manifest = await read_manifest(store, version)
    sizes = {"F32": 4, "BF16": 2, "I64": 8}
    assert all(t.offset % sizes[t.dtype] == 0 for t in manifest.tensors)


async def test_every_flipped_bit_is_noticed(store, tmp_path):
    """Whichever stored byte changes, in manifest, tensors or files, loading raises; the file header is not trusted at all."""
    version = await publish(store)
    tensors = await load(store, version)
    header = 8 + int.from_bytes((tmp_path / "versions/00000007-2/model.safetensors").read_bytes()[:8], "little")
    for path in [p for p in tmp_path.rglob("*") if p.is_file()]:
        good = path.read_bytes()
        for position in range(header if path.suffix == ".safetensors" else 0, len(good)):
            path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
            with pytest.raises(InvalidInput, match="damaged|checksum"):
                await load(store, version)
        path.write_bytes(good)
    assert await load(store, version) == tensors


async def test_a_truncated_tensor_object_is_noticed(store, tmp_path):
    """Fewer bytes than the manifest names are an error, not a short tensor."""
    version = await publish(store)
    path = tmp_path / "versions/00000007-2/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidInput, match="ends at byte"):
        await load(store, version)


@pytest.mark.parametrize("missing", ["manifest.json", "model.safetensors", "files"])
async def test_a_missing_object_is_named(store, missing):
    """NotFound carries the key."""
    version = await publish(store)
    key = (await store.list("files/"))[0] if missing == "files" else f"versions/00000007-2/{missing}"
    await store.delete(key)
    with pytest.raises(NotFound, match=key):
        await load(store, version)


async def test_a_manifest_of_another_run_or_version_is_refused(store):
    """Right bytes, wrong owner: a bucket shared by two runs, or a version that lies about its step."""
    version = await publish(store, run="other")
    with pytest.raises(InvalidInput, match="belongs to run 'other', not 'demo'"):
        await read_manifest(store, version, "demo")
    lie = policy_pb2.PolicyVersion()
    lie.CopyFrom(version)
    lie.step = 9
    with pytest.raises(InvalidInput, match=r"is \(number, step, incarnation\) \(7, 6, 2\), not \(7, 9, 2\)"):
        await read_manifest(store, lie)


@pytest.mark.parametrize("text", [b"[]", b"{}", b'{"format": 2}', b"\xff", b'{"format": 1, "tensors": 3}'])
async def test_what_is_not_a_manifest_is_refused(store, text):
    """Whatever the bytes are, the error is InvalidInput and names the key."""
    await store.put("m", text)
    with pytest.raises(InvalidInput, match="m (is not a manifest|has format 2, )"):
        await read_manifest(store, policy_pb2.PolicyVersion(manifest_key="m", manifest_crc32c=checksum(text)))


async def test_a_version_is_written_once(store):
    """A second writer of the same number and incarnation is refused, and the first one's tensors stay untouched."""
    version = await publish(store)
    before = await load(store, version)
    with pytest.raises(Conflict, match="written already"):
        await publish(store, tensors=[RawTensor("norm", "U8", (1,), b"z")])
    assert await load(store, version) == before


async def test_an_interrupted_write_can_be_repeated(store, monkeypatch):
    """Tensors without a manifest are not a version; writing again completes it."""
    async def lost(key, data):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(store, "put_if_absent", lost)
        with pytest.raises(RuntimeError):
            await publish(store, files={})
    assert await store.list("") == ["versions/00000007-2/model.safetensors"]
    assert len((await load(store, await publish(store)))[0]) == len(TENSORS)


async def test_files_are_shared_between_versions(store):
    """Tokenizers do not multiply; deleting a version leaves them to the others."""
    first, second = await publish(store, 7), await publish(store, 8)
    assert len(await store.list("files/")) == len(FILES)
    await delete_version(store, first)
    assert await store.list("versions/") == ["versions/00000008-2/manifest.json", "versions/00000008-2/model.safetensors"]
    assert (await load(store, second))[1] == FILES
    await delete_version(store, first)


@pytest.mark.parametrize("tensor, says", [
    (RawTensor("w", "F32", (2, 2), b"x" * 15), r"15 bytes are not F32\[2, 2\]"),
    (RawTensor("w", "float32", (1,), b"abcd"), "dtype 'float32' is not one of"),
    (RawTensor("norm", "U8", (1,), b"a"), "norm appears twice")])
async def test_a_tensor_that_contradicts_itself_is_not_written(store, tensor, says):
    """Nothing is stored under the version."""
    with pytest.raises(InvalidInput, match=says):
        await publish(store, tensors=[*TENSORS, tensor])
    assert await store.list("versions/") == []


async def test_neighbours_are_fetched_together_up_to_a_bound(store, monkeypatch):
    """Small tensors share a read; none exceeds the bound by more than one tensor; results keep the manifest's order."""
    monkeypatch.setattr("slipstream.tensors.READ_BYTES", 100)
    version = await publish(store, tensors=[RawTensor(f"t{i:02d}", "U8", (30,), bytes([i]) * 30) for i in range(20)])
    sizes, get = [], store.get

    async def counting(key, offset=0, size=None):
        sizes.append(size)
        return await get(key, offset, size)

    manifest = await read_manifest(store, version)
    monkeypatch.setattr(store, "get", counting)
    tensors = await read_tensors(store, manifest)
    assert sizes == [90] * 6 + [60]
    assert [(t.name, bytes(t.data)) for t in tensors] == [(f"t{i:02d}", bytes([i]) * 30) for i in range(20)]


async def test_the_manifest_of_the_release_before_is_read_and_that_of_a_later_one_is_named(store, tmp_path):
    """What was added since has a default; a format number that is not known is no damage, and the remedy is another one."""
    version = await publish(store)
    path = tmp_path / version.manifest_key
    fields = json.loads(path.read_text())
    for added in ("base", "full", "parent", "probes"):
        del fields[added]

    async def read(fields):
        path.write_text(text := json.dumps(fields))
        version.manifest_crc32c = checksum(text.encode())
        return await read_manifest(store, version, "demo")

    manifest = await read({**fields, "added_later": 1})
    assert (manifest.base, manifest.full, manifest.parent, manifest.probes) == (None, 7, None, None)
    with pytest.raises(InvalidInput, match="has format 2, release .* reads format 1; a newer release wrote it") as error:
        await read({**fields, "format": 2})
    assert error.value.reason == "FORMAT"
