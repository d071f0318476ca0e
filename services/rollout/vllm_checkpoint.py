"""A policy version as the checkpoint that vLLM loads: Hugging Face's names on disk, one file, verified before a pause.

The trainer publishes transformers' own tensors, in which the experts of a layer are one; checkpoints name each expert. The
model's conversion mapping, reversed by transformers itself, leads from the one to the other in every family that it knows.

The version of an adapter is written as the whole model that it makes: vllm_adapter.

Example: model.layers.0.mlp.experts.gate_up_proj [E, 2I, H]  ->  model.layers.0.mlp.experts.0.gate_proj.weight [I, H], ...
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import torch
from safetensors.torch import save_file

from services.rollout.vllm_adapter import MergedAdapter, split
from slipstream.errors import InvalidInput
from slipstream.manifest import RawTensor
from slipstream.model import ADAPTER_FILE

SHARED_MEMORY = Path("/dev/shm")  # weights written there are read back at memory speed
ROOM = 4  # models that must fit there: two files, and as much for others
PREFIX = "slipstream-vllm-"  # then the process id: who was killed cannot clean up
CHUNK = 16 << 20  # bytes of a file that are read at once
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}


class Checkpoints:
    """A folder that vLLM starts from, and one file per version in it. `close` removes it."""

    def __init__(
        self, files: Mapping[str, bytes], size: int, slots: bool = False, folder: Path | None = None,
    ) -> None:
        """`size`: bytes of one version's tensors. `slots`: versions of an adapter stay apart from their base. `folder`: the
        leader's, on the other nodes of its engine.

        Raises InvalidInput when the files do not describe a model.
        """
        roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > ROOM * size
        place = SHARED_MEMORY if roomy else Path(tempfile.gettempdir())
        remove_orphans(place)
        self.folder = folder or Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place))
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._files = files
        self._adapter: MergedAdapter | None = None
        self.slots = slots and ADAPTER_FILE in files
        for name, data in files.items():
            if name == ADAPTER_FILE:
                continue
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        try:
            self.model = _outline(self.folder)
        except (OSError, ValueError, KeyError) as error:
            self.close()
            raise InvalidInput(f"the files {sorted(files)} do not describe a model: {error}", "FILES") from error
        shape = json.loads(files["config.json"])
        if not shape.get("architectures"):  # a model that was built: vLLM asks for the class
            shape["architectures"] = [type(self.model).__name__]
            (self.folder / "config.json").write_text(json.dumps(shape))
        self.versions = self.folder / "versions"  # vLLM loads every file beside the configuration
        self.versions.mkdir()

    def tokenizer(self, files: Mapping[str, bytes]) -> tuple[Any, tuple[int, ...]]:
        """(tokenizer, ids that end an answer, ascending). Raises InvalidInput when the files hold none."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.folder)
        except (OSError, ValueError, KeyError) as error:
            raise InvalidInput(f"the files {sorted(files)} hold no tokenizer: {error}", "FILES") from error
        ends = json.loads(files.get("generation_config.json", b"{}")).get("eos_token_id")
        found = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
        return tokenizer, tuple(sorted(found))

    def write(self, tensors: Sequence[RawTensor], name: str) -> tuple[str, int]:
        """(path, CRC-32C) of a new checkpoint file. Raises InvalidInput, naming the tensor, when they do not fit the model.

        Of an adapter the first call is given its base, too.
        """
        if self.slots:
            return self._write_apart(tensors, name)
        tensors = self._whole(tensors)
        self.fits(tensors)
        return self._write_model(tensors, self.versions / name)

    def _write_apart(self, tensors: Sequence[RawTensor], name: str) -> tuple[str, int]:
        """A PEFT directory of the adapter alone. The base comes with the first version: an engine starts from it."""
        base, own = split(tensors)
        if base:
            self.fits(base)
            self._adapter = MergedAdapter(self._files, base, self.model)
            self.become(self._write_model(base, self.versions / "base.safetensors")[0])
        assert self._adapter is not None
        self._adapter.fits(own)
        folder = self.versions / name.removesuffix(".safetensors")
        folder.mkdir()
        (folder / ADAPTER_FILE).write_bytes(self._files[ADAPTER_FILE])
        path = folder / "adapter_model.safetensors"
        save_file({t.name: _tensor(t) for t in own}, path, {"format": "pt"})
        return str(path), checksum(str(path))

    def _write_model(self, tensors: Sequence[RawTensor], path: Path) -> tuple[str, int]:
        from transformers.core_model_loading import revert_weight_conversion

        named = revert_weight_conversion(self.model, {t.name: _tensor(t) for t in tensors})
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, path, {"format": "pt"})
        return str(path), checksum(str(path))

    def _whole(self, tensors: Sequence[RawTensor]) -> Sequence[RawTensor]:
        """The whole model's tensors."""
        if ADAPTER_FILE not in self._files:
            return tensors
        base, own = split(tensors)
        if self._adapter is None:
            self._adapter = MergedAdapter(self._files, base, self.model)
        return self._adapter.merged(own)

    def fits(self, tensors: Sequence[RawTensor]) -> None:
        """Raises InvalidInput, naming the tensor, when one is missing, unexpected, of another shape, or too short."""
        own = self.model.state_dict()
        given = {tensor.name for tensor in tensors}
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
        if missing := sorted(set(own) - given - tied):
            raise InvalidInput(f"the version lacks {len(missing)} tensors of the model, first {missing[0]}", "MISSING_TENSOR")
        if more := sorted(given - set(own)):
            raise InvalidInput(f"the version has {len(more)} tensors the model lacks, first {more[0]}", "UNEXPECTED_TENSOR")
        for tensor in tensors:
            shape = tuple(own[tensor.name].shape)
            if tuple(tensor.shape) != shape:
                raise InvalidInput(f"tensor {tensor.name}: shape {tuple(tensor.shape)} is not the model's {shape}", "SHAPE")
            if tensor.dtype not in DTYPES:
                raise InvalidInput(f"tensor {tensor.name}: dtype {tensor.dtype} is not one of {sorted(DTYPES)}", "DTYPE")
            if (held := memoryview(tensor.data).nbytes) != tensor.size:
                raise InvalidInput(f"tensor {tensor.name}: {held} bytes instead of {tensor.size}", "SIZE")

    def drop(self, path: str) -> None:
        """Delete the file of a version that nobody goes back to."""
        Path(path).unlink(missing_ok=True)
        if self.slots:
            shutil.rmtree(Path(path).parent, ignore_errors=True)

    def serve_adapter(self, path: str) -> Path:
        """The folder that requests name, the same for all versions: from here on it is that of `path`."""
        link, new = self.folder / "policy", self.folder / ".policy"
        new.unlink(missing_ok=True)
        new.symlink_to(Path(path).parent, target_is_directory=True)
        new.replace(link)
        return link

    @property
    def adapted_layers(self) -> list[str]:
        """Full names of the layers that the adapter is on."""
        return list(json.loads(self._files[ADAPTER_FILE])["target_modules"]) if self.slots else []

    @property
    def adapts_experts(self) -> bool:
        return self.slots and bool(json.loads(self._files[ADAPTER_FILE]).get("target_parameters"))

    @property
    def rank(self) -> int:
        return int(json.loads(self._files[ADAPTER_FILE])["r"])

    @property
    def has_experts(self) -> bool:
        return any(parameter.ndim == 3 for parameter in self.model.parameters())

    def become(self, path: str) -> None:
        """Let `path` be what an engine that starts in the folder loads."""
        target = self.folder / "model.safetensors"
        if self.slots and target.exists():
            return  # the base: it never changes
        target.unlink(missing_ok=True)
        target.hardlink_to(path)

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _outline(folder: Path) -> Any:
    """The model without memory: its names, shapes and conversion mapping."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape)


def _tensor(tensor: RawTensor) -> torch.Tensor:
    """Shares memory with the bytes where those are writable."""
    data = np.frombuffer(tensor.data, np.uint8)
    data = data if data.flags.writeable else data.copy()
    return torch.from_numpy(data).view(DTYPES[tensor.dtype]).reshape(tensor.shape)


def remove_orphans(place: Path) -> None:
    """Delete the folders of our user's processes that are no more: in shared memory they are memory."""
    for folder in place.glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        try:
            if pid.isdigit() and folder.stat().st_uid == os.getuid():
                os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (FileNotFoundError, PermissionError):  # another cleans up too, or the id is somebody else's by now
            continue


def checksum(path: str) -> int:
    """CRC-32C of a file."""
    value = 0
    with Path(path).open("rb") as file:
        while chunk := file.read(CHUNK):
            value = google_crc32c.extend(value, chunk)
    return value
