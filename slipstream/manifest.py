"""Policy versions in the object store: one safetensors object, one manifest that names every byte range with its checksum.

A manifest is written once, after its tensors; what it names never changes. Readers trust nothing but the manifest's checksum in
the PolicyVersion and the checksums inside it. The tensor object is a plain safetensors file, so any tool opens it.

Example, version 7 of incarnation 1:
    versions/00000007-1/model.safetensors    8-byte header length, JSON header, tensors back to back
    versions/00000007-1/manifest.json        {"number": 7, "tensors": [{"name", "dtype", "shape", "key", "offset", ...}], ...}
    files/<sha256>                           config.json and tokenizer files, shared by all versions that have the same
    bases/<sha256>/                          model.safetensors and manifest.json of weights that adapters go on from

The version of an adapter holds the adapter's tensors only and names its base, written once a run and never deleted.

A version may be a patch of the one before it, its parent: a tensor that changed little is stored as slipstream.patch makes it,
in model.safetensors under its name. `full` is the number of the complete version at the start of that chain. Checksums are
those of whole tensors, so whoever reads a patch has proved what it rebuilt.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format

from slipstream.errors import Conflict, InvalidInput
from slipstream.formats import known
from slipstream.objects import ObjectStore
from slipstream.protos.types.v1 import policy_pb2
from slipstream.ranges import Source, read_whole
from slipstream.tensors import RawTensor as RawTensor  # also known from here: tensors of versions
from slipstream.tensors import TensorEntry as TensorEntry
from slipstream.tensors import checksum as checksum
from slipstream.tensors import layout as layout
from slipstream.tensors import read_entries as read_entries

if TYPE_CHECKING:  # numpy: only where patches and probes are
    from slipstream.probes import Probes

FORMAT = 1
PATCH_MOST = 0.5  # a patch of more than this share of its tensor is not worth its trouble


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
    base: FileEntry | None  # manifest of the weights that this adapter goes on from; None = complete
    tensors: tuple[TensorEntry, ...]
    files: Mapping[str, FileEntry]
    parent: policy_pb2.PolicyVersion | None = None  # the version that this one is a patch of
    full: int = 0  # number of the complete version that the chain of patches starts from; its own when it is complete
    probes: Probes | None = None  # what the trainer's model says of them


@dataclass(frozen=True, slots=True)
class Held:
    """A version whose tensors somebody has in memory: what patches are made against, and applied to."""

    version: policy_pb2.PolicyVersion
    tensors: Sequence[RawTensor]
    full: int = 0  # as in its manifest

async def write_version(
    store: ObjectStore, *, run: str, number: int, step: int, incarnation: int, tensors: Sequence[RawTensor],
    files: Mapping[str, bytes], base: FileEntry | None = None, parent: Held | None = None, probes: Probes | None = None,
) -> policy_pb2.PolicyVersion:
    """Write files, tensors and then the manifest, durably. Calling again after a failure is safe. `base`: see `write_base`.

    With a `parent`, tensors that changed little since are written as patches.

    Raises InvalidInput when a tensor's data does not fit its dtype and shape; Conflict when the version exists already.
    """
    folder = _folder(number, incarnation)
    manifest_key = f"{folder}/manifest.json"
    if await store.list(manifest_key):
        raise Conflict(f"{manifest_key} exists: this version was written already", "VERSION_EXISTS", version=number)
    file_entries = await _write_files(store, files)
    key = f"{folder}/model.safetensors"
    metadata = {"format": "pt", "run": run, "step": str(step)}
    if parent is None:
        header, ordered, entries = await asyncio.to_thread(layout, tensors, key, metadata)
    else:
        header, ordered, entries = await asyncio.to_thread(_patched_layout, tensors, parent, key, metadata)
        if not any(e.patched for e in entries):
            parent = None
    await store.put(key, [header, *(t.data for t in ordered)])
    text = json.dumps({
        "format": FORMAT, "run": run, "number": number, "step": step, "incarnation": incarnation,
        "base": base and _plain(base), "full": parent.full if parent else number,
        "parent": parent and json_format.MessageToDict(parent.version, preserving_proto_field_name=True),
        "probes": probes and probes.plain(),
        "writer": uuid.uuid4().hex, "tensors": [_plain(e) for e in entries],
        "files": {name: _plain(e) for name, e in sorted(file_entries.items())},
    }).encode()
    if not await store.put_if_absent(manifest_key, text):
        raise Conflict(f"{manifest_key} exists: another trainer wrote this version", "VERSION_EXISTS", version=number)
    return policy_pb2.PolicyVersion(
        number=number, step=step, incarnation=incarnation, manifest_key=manifest_key, manifest_crc32c=checksum(text))


async def write_base(store: ObjectStore, tensors: Sequence[RawTensor]) -> FileEntry:
    """Write weights that adapters go on from, durably, once: what is there already is only named. Returns its manifest."""
    digest = await asyncio.to_thread(weights_digest, tensors)
    key = f"bases/{digest}/model.safetensors"
    header, ordered, entries = await asyncio.to_thread(layout, tensors, key, {"format": "pt"})
    text = json.dumps({"format": FORMAT, "tensors": [_plain(e) for e in entries]}).encode()
    entry = FileEntry(f"bases/{digest}/manifest.json", len(text), checksum(text))
    if not await store.list(entry.key):
        await store.put(key, [header, *(t.data for t in ordered)])
        await store.put_if_absent(entry.key, text)
    return entry


async def read_manifest(store: Source, version: policy_pb2.PolicyVersion, run: str = "") -> Manifest:
    """The manifest of a version, checked against its checksum and, when given, the run.

    Raises NotFound when it is not there, InvalidInput (MANIFEST_*) when it is not what was published.
    """
    text, whole = await read_whole(store, version.manifest_key, version.manifest_crc32c)
    place = {"version": version.number, "key": version.manifest_key}
    if not whole:
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
        return _parse(json.loads(text), key)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{key} is not a manifest: {error!r}", "MANIFEST_FORMAT", key=key) from None


async def read_tensors(store: Source, manifest: Manifest, held: Held | None = None) -> list[RawTensor]:
    """Every tensor, in the order of the manifest, each checked against its checksum before anything is returned.

    A patch is applied to the parent's tensors: those `held`, or else read first, from the complete version on.
    Raises NotFound when an object is missing, InvalidInput (TENSOR_CHECKSUM, TENSOR_RANGE, PATCH) when bytes are wrong.
    """
    if manifest.parent is None:
        return await read_entries(store, manifest.tensors, f"version {manifest.number}")
    if held is not None and held.version.number == manifest.parent.number:
        before = held.tensors
    else:
        before = await read_tensors(store, await read_manifest(store, manifest.parent, manifest.run), held)
    stored = await read_entries(store, manifest.tensors, f"version {manifest.number}")
    return await asyncio.to_thread(_rebuilt, manifest, stored, before)


def _rebuilt(manifest: Manifest, stored: Sequence[RawTensor], before: Sequence[RawTensor]) -> list[RawTensor]:
    """Patches applied to the parent's tensors, and the others as they are."""
    from slipstream import patch

    parents, tensors = {t.name: t for t in before}, []
    for entry, tensor in zip(manifest.tensors, stored, strict=True):
        if entry.patched:
            place = {"version": manifest.number, "tensor": entry.name}
            if (parent := parents.get(entry.name)) is None or (parent.dtype, parent.shape) != (entry.dtype, entry.shape):
                raise InvalidInput(f"version {manifest.number}: its parent lacks tensor {entry.name}", "PATCH", **place)
            data = patch.decode(parent.data, tensor.data, entry.dtype)
            if checksum(data) != entry.crc32c:
                raise InvalidInput(
                    f"version {manifest.number}: tensor {entry.name} is not what its patch was made for", "TENSOR_CHECKSUM",
                    **place)
            tensor = RawTensor(entry.name, entry.dtype, entry.shape, data)
        tensors.append(tensor)
    return tensors


def _patched_layout(
    tensors: Sequence[RawTensor], parent: Held, key: str, metadata: Mapping[str, str],
) -> tuple[bytes, list[RawTensor], list[TensorEntry]]:
    """As `layout`, with patches in the place of tensors that changed little."""
    from slipstream import patch

    before, stored, whole = {t.name: t for t in parent.tensors}, [], {}
    for tensor in tensors:
        old, made = before.get(tensor.name), None
        if old is not None and (old.dtype, old.shape) == (tensor.dtype, tensor.shape):
            made = patch.encode(old.data, tensor.data, tensor.dtype, PATCH_MOST)
        if made is not None and len(made) <= PATCH_MOST * tensor.size:
            whole[tensor.name] = tensor
            stored.append(RawTensor(tensor.name, "U8", (len(made),), made))
        else:
            stored.append(tensor)
    header, ordered, entries = layout(stored, key, metadata)
    for n, entry in enumerate(entries):
        if (tensor := whole.get(entry.name)) is not None:
            entries[n] = replace(
                entry, dtype=tensor.dtype, shape=tensor.shape, crc32c=checksum(tensor.data), patched=True,
                stored_crc32c=entry.crc32c)
    return header, ordered, entries


async def read_complete(store: Source, manifest: Manifest) -> list[RawTensor]:
    """The tensors of the base, if there is one, and those of the version. Raises NotFound, InvalidInput, as `read_tensors`."""
    own = await read_tensors(store, manifest)
    if manifest.base is None:
        return own
    text, whole = await read_whole(store, manifest.base.key, manifest.base.crc32c)
    if len(text) != manifest.base.size or not whole:
        raise InvalidInput(f"{manifest.base.key}: it is not the base of version {manifest.number}", "MANIFEST_CHECKSUM",
                           version=manifest.number, key=manifest.base.key)
    entries = _entries(json.loads(text))
    return [*await read_entries(store, entries, f"base of version {manifest.number}"), *own]


async def read_files(store: Source, manifest: Manifest) -> dict[str, bytes]:
    """config.json and tokenizer files by name. Raises NotFound; InvalidInput (FILE_CHECKSUM)."""
    files = {}
    for name, entry in manifest.files.items():
        data, whole = await read_whole(store, entry.key, entry.crc32c)
        if len(data) != entry.size or not whole:
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


async def stored_versions(store: ObjectStore) -> list[tuple[policy_pb2.PolicyVersion, int]]:
    """Every version of which something is in the store, announced or not, whole or not, and the `full` of its manifest (its
    own number without one). Number and incarnation are all that is known of a version here."""
    found: dict[tuple[int, int], int] = {}
    for key in await store.list("versions/"):
        if not (named := re.match(r"versions/(\d+)-(\d+)/", key)):
            continue  # somebody else's
        place = int(named[1]), int(named[2])
        found.setdefault(place, place[0])
        if key.endswith("/manifest.json"):
            with contextlib.suppress(InvalidInput):  # gone meanwhile, or damaged: no chain hangs on it
                found[place] = manifest_of(await store.get(key), key).full
    return [(policy_pb2.PolicyVersion(number=n, incarnation=i), full) for (n, i), full in sorted(found.items())]


def weights_hash(tensors: Iterable[TensorEntry]) -> str:
    """What identifies the weights of a version, wherever they lie: SHA-256 over names, dtypes, shapes and checksums."""
    lines = sorted(f"{t.name} {t.dtype} {list(t.shape)} {t.crc32c:08x}" for t in tensors)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def weights_digest(tensors: Sequence[RawTensor]) -> str:
    """`weights_hash` of tensors in memory."""
    return weights_hash(layout(tensors, "-", {})[2])


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


def _parse(data: dict[str, Any], key: str) -> Manifest:
    known(key, data["format"], FORMAT)
    files = {name: FileEntry(f["key"], f["size"], f["crc32c"]) for name, f in data["files"].items()}
    base = data.get("base")  # what is absent was added after the manifest was written
    base = FileEntry(base["key"], base["size"], base["crc32c"]) if base else None
    parent = data.get("parent")
    parent = json_format.ParseDict(parent, policy_pb2.PolicyVersion(), ignore_unknown_fields=True) if parent else None
    probes = None
    if data.get("probes"):
        from slipstream.probes import Probes

        probes = Probes.parse(data["probes"])
    return Manifest(
        data["run"], data["number"], data["step"], data["incarnation"], data["writer"], base, _entries(data), files, parent,
        data.get("full", data["number"]), probes)


def _entries(data: dict[str, Any]) -> tuple[TensorEntry, ...]:
    tensors = tuple(
        TensorEntry(
            t["name"], t["dtype"], tuple(t["shape"]), t["key"], t["offset"], t["size"], t["crc32c"], t.get("patched", False),
            t.get("stored_crc32c"))
        for t in data["tensors"])
    for t in tensors:
        whole = RawTensor(t.name, t.dtype, t.shape, b"").size
        if (t.size > whole if t.patched else t.size != whole) or t.offset < 0:
            raise ValueError(f"tensor {t.name}: size {t.size} does not fit {t.dtype}{list(t.shape)}")
    return tensors
