"""Policy versions in the object store: one safetensors object, one manifest that names every byte range with its checksum.

A manifest is written once, after its tensors; what it names never changes. Readers trust nothing but the manifest's checksum in
the PolicyVersion and the checksums inside it. The tensor object is a plain safetensors file, so any tool opens it.

Example, version 7 of incarnation 1:
    versions/00000007-1/model.safetensors    8-byte header length, JSON header, tensors back to back
    versions/00000007-1/manifest.json        {"number": 7, "tensors": [{"name", "dtype", "shape", "key", "offset", ...}], ...}
    files/<sha256>                           config.json and tokenizer files, shared by all versions that have the same
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c

from slipstream.errors import Conflict, InvalidInput, OutOfRange
from slipstream.objects import ObjectStore, Piece
from slipstream.protos.types.v1 import policy_pb2

# Bytes per element, by safetensors' spelling.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}
FORMAT = 1
READ_BYTES = 32 << 20  # neighbouring tensors are fetched together up to this
READERS = 4


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as bytes: row-major, little-endian. `dtype` in safetensors' spelling, such as "F32" or "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Piece

    @property
    def size(self) -> int:
        """Bytes that dtype and shape ask for."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: bytes [offset, offset + size) of the object `key`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    key: str
    offset: int
    size: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A whole object with its checksum."""

    key: str
    size: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The immutable description of a policy version."""

    run: str
    number: int
    step: int
    incarnation: int
    writer: str
    base: int | None  # number of the version that this one is a patch of; None = complete
    tensors: tuple[TensorEntry, ...]
    files: Mapping[str, FileEntry]


async def write_version(
    store: ObjectStore, *, run: str, number: int, step: int, incarnation: int, tensors: Sequence[RawTensor],
    files: Mapping[str, bytes],
) -> policy_pb2.PolicyVersion:
    """Write files, tensors and then the manifest, durably. Calling again after a failure is safe.

    Raises InvalidInput when a tensor's data does not fit its dtype and shape; Conflict when the version exists already.
    """
    folder = _folder(number, incarnation)
    manifest_key = f"{folder}/manifest.json"
    if await store.list(manifest_key):
        raise Conflict(f"{manifest_key} exists: this version was written already", "VERSION_EXISTS", version=number)
    file_entries = await _write_files(store, files)
    key = f"{folder}/model.safetensors"
    header, ordered, entries = await asyncio.to_thread(layout, tensors, key, {"format": "pt", "run": run, "step": str(step)})
    await store.put(key, [header, *(t.data for t in ordered)])
    text = json.dumps({
        "format": FORMAT, "run": run, "number": number, "step": step, "incarnation": incarnation, "base": None,
        "writer": uuid.uuid4().hex, "tensors": [_plain(e) for e in entries],
        "files": {name: _plain(e) for name, e in sorted(file_entries.items())},
    }).encode()
    if not await store.put_if_absent(manifest_key, text):
        raise Conflict(f"{manifest_key} exists: another trainer wrote this version", "VERSION_EXISTS", version=number)
    return policy_pb2.PolicyVersion(
        number=number, step=step, incarnation=incarnation, manifest_key=manifest_key, manifest_crc32c=checksum(text))


async def read_manifest(store: ObjectStore, version: policy_pb2.PolicyVersion, run: str = "") -> Manifest:
    """The manifest of a version, checked against its checksum and, when given, the run.

    Raises NotFound when it is not there, InvalidInput (MANIFEST_*) when it is not what was published.
    """
    text = await store.get(version.manifest_key)
    place = {"version": version.number, "key": version.manifest_key}
    if checksum(text) != version.manifest_crc32c:
        raise InvalidInput(f"{version.manifest_key}: the checksum differs from the published one", "MANIFEST_CHECKSUM", **place)
    manifest = manifest_of(text, version.manifest_key)
    if run and manifest.run != run:
        raise InvalidInput(f"{version.manifest_key} belongs to run {manifest.run!r}, not {run!r}", "MANIFEST_RUN", **place)
    told = (version.number, version.step, version.incarnation)
    if (found := (manifest.number, manifest.step, manifest.incarnation)) != told:
        raise InvalidInput(
            f"{version.manifest_key} is (number, step, incarnation) {found}, not {told}", "MANIFEST_VERSION", **place)
    return manifest


def manifest_of(text: bytes, key: str) -> Manifest:
    """A manifest from its bytes, for audits: without a PolicyVersion nothing proves whose it is. Raises InvalidInput."""
    try:
        return _parse(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{key} is not a manifest: {error!r}", "MANIFEST_FORMAT", key=key) from None


async def read_tensors(store: ObjectStore, manifest: Manifest) -> list[RawTensor]:
    """Every tensor, in the order of the manifest, each checked against its checksum before anything is returned.

    Raises NotFound when an object is missing, InvalidInput (TENSOR_CHECKSUM, TENSOR_RANGE) when bytes are wrong.
    """
    return await read_entries(store, manifest.tensors, f"version {manifest.number}")


async def read_entries(store: ObjectStore, entries: Sequence[TensorEntry], what: str) -> list[RawTensor]:
    """Tensors wherever they lie, in the order of `entries`; neighbours are fetched together. `what` is for messages.

    Raises NotFound when an object is missing, InvalidInput (TENSOR_CHECKSUM, TENSOR_RANGE) when bytes are wrong.
    """
    readers = asyncio.Semaphore(READERS)

    async def fetch(some: list[TensorEntry]) -> list[RawTensor]:
        async with readers:
            first, last = some[0], some[-1]
            size = last.offset + last.size - first.offset
            try:
                data = memoryview(await store.get(first.key, first.offset, size))
            except OutOfRange as error:
                raise InvalidInput(f"{what}: {error.message}", "TENSOR_RANGE", key=first.key) from None
            if size < READ_BYTES // 8:
                return _checked(what, some, data)
            return await asyncio.to_thread(_checked, what, some, data)

    parts = await asyncio.gather(*(fetch(some) for some in _ranges(entries)))
    return [tensor for part in parts for tensor in part]


async def read_files(store: ObjectStore, manifest: Manifest) -> dict[str, bytes]:
    """config.json and tokenizer files by name. Raises NotFound; InvalidInput (FILE_CHECKSUM)."""
    files = {}
    for name, entry in manifest.files.items():
        data = await store.get(entry.key)
        if len(data) != entry.size or checksum(data) != entry.crc32c:
            raise InvalidInput(
                f"version {manifest.number}: {name} ({entry.key}) is damaged", "FILE_CHECKSUM",
                version=manifest.number, file=name)
        files[name] = data
    return files


async def delete_version(store: ObjectStore, version: policy_pb2.PolicyVersion) -> None:
    """Remove manifest and tensors, manifest first: what is half deleted does not look whole. Missing ones are fine."""
    folder = _folder(version.number, version.incarnation)
    await store.delete(f"{folder}/manifest.json")
    for key in await store.list(f"{folder}/"):
        await store.delete(key)


def layout(
    tensors: Sequence[RawTensor], key: str, metadata: Mapping[str, str]
) -> tuple[bytes, list[RawTensor], list[TensorEntry]]:
    """Header of a safetensors object, its tensors in file order, and where each lies.

    Wide types first, so that every tensor is aligned to its element size; the header is padded with spaces to 8 bytes.
    https://huggingface.co/docs/safetensors/index#format
    """
    for tensor in tensors:
        if tensor.dtype not in DTYPE_BYTES:
            raise InvalidInput(
                f"tensor {tensor.name}: dtype {tensor.dtype!r} is not one of {', '.join(DTYPE_BYTES)}", "TENSOR_DTYPE",
                tensor=tensor.name)
        if memoryview(tensor.data).nbytes != tensor.size:
            raise InvalidInput(
                f"tensor {tensor.name}: {memoryview(tensor.data).nbytes} bytes are not {tensor.dtype}{list(tensor.shape)}",
                "TENSOR_SHAPE", tensor=tensor.name)
    ordered = sorted(tensors, key=lambda t: (-DTYPE_BYTES[t.dtype], t.name))
    if duplicate := next((a.name for a, b in itertools.pairwise(ordered) if a.name == b.name), None):
        raise InvalidInput(f"tensor {duplicate} appears twice", "TENSOR_NAME", tensor=duplicate)
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for tensor in ordered:
        table[tensor.name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.size]}
        offset += tensor.size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    entries = [
        TensorEntry(t.name, t.dtype, t.shape, key, len(header) + table[t.name]["data_offsets"][0], t.size, checksum(t.data))
        for t in ordered
    ]
    return header, ordered, entries


def weights_hash(tensors: Iterable[TensorEntry]) -> str:
    """What identifies the weights of a version, wherever they lie: SHA-256 over names, dtypes, shapes and checksums."""
    lines = sorted(f"{t.name} {t.dtype} {list(t.shape)} {t.crc32c:08x}" for t in tensors)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def checksum(data: Piece) -> int:
    """CRC-32C of any buffer. google_crc32c takes only `bytes`: larger buffers go through it in cache-sized copies."""
    if isinstance(data, bytes):
        return google_crc32c.value(data)
    view, crc = memoryview(data).cast("B"), 0
    for start in range(0, len(view), 1 << 18):
        crc = google_crc32c.extend(crc, bytes(view[start : start + (1 << 18)]))
    return crc


async def _write_files(store: ObjectStore, files: Mapping[str, bytes]) -> dict[str, FileEntry]:
    """Content-addressed, so that what every version shares is written once."""
    present, entries = set(await store.list("files/")), {}
    for name, data in files.items():
        key = f"files/{hashlib.sha256(data).hexdigest()}"
        if key not in present:
            await store.put_if_absent(key, data)
        entries[name] = FileEntry(key, len(data), checksum(data))
    return entries


def _folder(number: int, incarnation: int) -> str:
    return f"versions/{number:08d}-{incarnation}"


def _plain(entry: TensorEntry | FileEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__slots__}


def _parse(data: dict[str, Any]) -> Manifest:
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']} is not {FORMAT}")
    tensors = tuple(
        TensorEntry(t["name"], t["dtype"], tuple(t["shape"]), t["key"], t["offset"], t["size"], t["crc32c"])
        for t in data["tensors"])
    for t in tensors:
        if t.size != math.prod(t.shape) * DTYPE_BYTES[t.dtype] or t.offset < 0:
            raise ValueError(f"tensor {t.name}: size {t.size} does not fit {t.dtype}{list(t.shape)}")
    files = {name: FileEntry(f["key"], f["size"], f["crc32c"]) for name, f in data["files"].items()}
    return Manifest(
        data["run"], data["number"], data["step"], data["incarnation"], data["writer"], data["base"], tensors, files)


def _ranges(tensors: Sequence[TensorEntry]) -> list[list[TensorEntry]]:
    """Neighbours in one object, joined up to READ_BYTES."""
    ranges: list[list[TensorEntry]] = []
    for t in tensors:
        last = ranges[-1][-1] if ranges else None
        joined = last is not None and last.key == t.key and last.offset + last.size == t.offset
        if joined and t.offset + t.size - ranges[-1][0].offset <= READ_BYTES:
            ranges[-1].append(t)
        else:
            ranges.append([t])
    return ranges


def _checked(what: str, entries: Sequence[TensorEntry], data: memoryview) -> list[RawTensor]:
    """Cut one fetched range into tensors and compare their checksums."""
    tensors = []
    for e in entries:
        part = data[e.offset - entries[0].offset :][: e.size]
        if checksum(part) != e.crc32c:
            raise InvalidInput(
                f"{what}: tensor {e.name} ({e.key}, bytes {e.offset} to {e.offset + e.size}) is damaged",
                "TENSOR_CHECKSUM", key=e.key, tensor=e.name)
        tensors.append(RawTensor(e.name, e.dtype, e.shape, part))
    return tensors
