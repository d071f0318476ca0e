"""The model of a run: built or loaded, taken apart into raw tensors, and put together again on the other side.

Only the trainer and the torch engine import this module; it loads torch and transformers at its top.

Axes: N rows (tokens), H hidden, I expert width, E experts, K experts per row.

Example:
    model, tokenizer = build(run.model, run.run.seed, deterministic=run.deterministic)
    sent = files(model, tokenizer), state(model)
    other, tokenizer = skeleton(sent[0], "float32", experts="grouped_mm")
    load_state(other, sent[1])
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    modeling_rope_utils,
)
from transformers.initialization import no_init_weights
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from slipstream import config
from slipstream.errors import ConfigError, InvalidInput
from slipstream.manifest import RawTensor
from slipstream.router_precision import compute_in_float32
from slipstream.seeds import stream

if TYPE_CHECKING:
    from slipstream.adapters import Merged

PAD, EOS = "<pad>", "<eos>"
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # and nobody writes: see `cooked`
ADAPTER_FILE = "adapter_config.json"  # among a version's files when it is an adapter's: PEFT's description of it

_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
# What transformers raises for a directory that it cannot load, and for a configuration that makes no model.
UNREADABLE = (ImportError, OSError, ValueError, KeyError, SafetensorError)
UNFIT = (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, ArithmeticError)


def dense_experts(
    experts: Any, hidden_N_H: torch.Tensor, index_N_K: torch.Tensor, weights_N_K: torch.Tensor
) -> torch.Tensor:
    """Every expert on every row by `bmm`, weighted by zero where it was not chosen: float [N, H].

    A row's result does not depend on what the other rows hold, as long as N stays the same and is at least 8 (at fixed N the
    kernel's blocking is fixed; `grouped_mm` blocks by how many rows an expert happens to get). That is what makes a
    deterministic run's log-probabilities repeatable, for E / K times the arithmetic.
    """
    weights_N_E = torch.zeros(
        hidden_N_H.shape[0],
        experts.num_experts,
        dtype=weights_N_K.dtype,
        device=weights_N_K.device,
    ).scatter(1, index_N_K, weights_N_K)
    rows_E_N_H = hidden_N_H.expand(experts.num_experts, -1, -1)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    inner_E_N_I = _expert_linear(experts, rows_E_N_H, name)
    inner_E_N_I = experts._apply_gate(inner_E_N_I) if experts.has_gate else experts.act_fn(inner_E_N_I)
    out_E_N_H = _expert_linear(experts, inner_E_N_I, "down_proj")
    if experts.has_post_expert_norm:
        out_E_N_H = experts.post_expert_norm(out_E_N_H)
    return (out_E_N_H * weights_N_E.t().unsqueeze(-1)).sum(dim=0).to(hidden_N_H.dtype)


def _expert_linear(experts: Any, rows: torch.Tensor, name: str) -> torch.Tensor:
    weight = getattr(experts, name)
    out = torch.bmm(rows, weight if experts.is_transposed else weight.transpose(1, 2))
    return out + getattr(experts, name + "_bias").unsqueeze(1) if experts.has_bias else out


ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)
transformers.utils.logging.disable_progress_bar()  # stderr is for JSON lines


def build(model: config.Model, seed: int, deterministic: bool = False) -> tuple[nn.Module, Any]:
    """The model and tokenizer that a run starts from, on the CPU, in `model.dtype`, in training mode.

    Fresh weights are a function of `seed` only. Expert kernel: dense when `deterministic`, else `model.experts`.
    Raises ConfigError when the directory, its weights, the tokenizer or the model type is missing.
    """
    experts = "dense" if deterministic else "grouped_mm" if model.experts == "auto" else model.experts
    dtype = getattr(torch, model.dtype)
    if model.build is None:
        loaded, tokenizer = _load(model, dtype, experts)
    else:
        loaded, tokenizer = _fresh(model.build, dtype, experts, seed)
    loaded.train()
    compute_in_float32(loaded)
    return loaded, tokenizer


def files(model: nn.Module, tokenizer: Any) -> dict[str, bytes]:
    """What a reader needs beside the tensors: config.json, generation_config.json and the tokenizer's files, by name."""
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)  # pyright: ignore
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)  # pyright: ignore
        tokenizer.save_pretrained(folder)
        root = Path(folder)
        return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def skeleton(sent: Mapping[str, bytes], dtype: str = "float32", experts: str = "grouped_mm") -> tuple[nn.Module, Any]:
    """A model with uninitialised weights, in evaluation mode, and its tokenizer, from what `files` gave.

    `load_state` must follow. Raises InvalidInput when config.json or the tokenizer is missing or unreadable.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, data in sent.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        try:
            shape = AutoConfig.from_pretrained(folder)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            with no_init_weights():
                model = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, dtype), **_kernel(shape, experts))
            if "generation_config.json" in sent:
                model.generation_config = GenerationConfig.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            raise InvalidInput(f"the files {sorted(sent)} do not describe a model: {_one_line(error)}", "FILES") from error
    model.tie_weights()
    model.eval()
    compute_in_float32(model)
    return model, tokenizer


def assembled(
    sent: Mapping[str, bytes], tensors: Sequence[RawTensor], dtype: str = "float32", experts: str = "grouped_mm",
) -> tuple[nn.Module, Any, Merged | None]:
    """The model of a complete version (slipstream.manifest.read_complete), its tokenizer, and its adapter, if it has one.

    Raises InvalidInput when files and tensors do not fit each other, ConfigError when the package peft is missing.
    """
    model, tokenizer = skeleton(sent, dtype, experts)
    if ADAPTER_FILE not in sent:
        load_state(model, tensors)
        return model, tokenizer, None
    try:
        from slipstream import adapters
    except ModuleNotFoundError as error:
        raise ConfigError(f"an adapter needs the package {error.name}: pip install 'slipstream[lora]'") from None
    base, own = adapters.split(tensors)
    load_state(model, base)
    merged = adapters.Merged(adapters.attach_sent(model, sent))
    merged.load(own)
    return model, tokenizer, merged


def experts_of(model: nn.Module) -> list[Any]:
    """The experts modules in depth order, of any family that transformers runs through its experts interface; [] if dense."""
    return [m for m in model.modules() if hasattr(m, "_is_expert_parallel")]


def state(model: nn.Module) -> list[RawTensor]:
    """A snapshot of the weights in state_dict order: later changes of the model do not show. Tied weights appear once."""
    return [raw(name, tensor) for name, tensor in _unique(model.state_dict()).items()]


def views(model: nn.Module) -> list[RawTensor]:
    """The same without a copy, for weights that do not change."""
    return [bare(name, tensor.cpu().contiguous()) for name, tensor in _unique(model.state_dict()).items()]


def raw(name: str, tensor: torch.Tensor) -> RawTensor:
    """One tensor as named bytes, copied."""
    return bare(name, tensor.detach().cpu().contiguous().clone())


def bare(name: str, tensor: torch.Tensor) -> RawTensor:
    """One contiguous CPU tensor as named bytes, sharing its memory."""
    data = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return RawTensor(name, _NAMES[tensor.dtype], tuple(tensor.shape), data)


def cooked(tensor: RawTensor) -> torch.Tensor:
    """The inverse of `raw`. The result shares memory with `tensor.data`, so copy before writing."""
    dtype = dtype_named(tensor.name, tensor.dtype)
    return torch.from_numpy(np.frombuffer(tensor.data, np.uint8)).view(dtype).reshape(tuple(tensor.shape))


def dtype_named(tensor: str, dtype: str) -> torch.dtype:
    """torch's dtype of safetensors' spelling. Raises InvalidInput, naming the tensor."""
    if (found := _DTYPES.get(dtype)) is None:
        raise InvalidInput(f"tensor {tensor}: dtype {dtype} is not one of {sorted(_DTYPES)}", "DTYPE")
    return found


@torch.no_grad()
def load_state(model: nn.Module, tensors: Sequence[RawTensor]) -> None:
    """Write `tensors` into the model in place, all or nothing: every check precedes the first write.

    Raises InvalidInput when a name is missing or unexpected, or a shape differs.
    """
    own = model.state_dict()
    expected = set(_unique(own))
    given = {tensor.name for tensor in tensors}
    if missing := sorted(expected - given):
        raise InvalidInput(f"the version lacks {len(missing)} tensors of the model, first {missing[0]}", "MISSING_TENSOR")
    if unexpected := sorted(given - expected):
        raise InvalidInput(
            f"the version has {len(unexpected)} tensors the model lacks, first {unexpected[0]}", "UNEXPECTED_TENSOR"
        )
    for tensor in tensors:
        if tuple(tensor.shape) != tuple(own[tensor.name].shape):
            raise InvalidInput(
                f"tensor {tensor.name}: shape {tuple(tensor.shape)} is not the model's {tuple(own[tensor.name].shape)}", "SHAPE"
            )
    for tensor in tensors:
        own[tensor.name].copy_(cooked(tensor))


def stop_token_ids(tokenizer: Any, model: nn.Module | None = None) -> tuple[int, ...]:
    """Ids that end an answer, ascending: the tokenizer's EOS and those of the model's generation configuration."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for ids in (tokenizer.eos_token_id, generation.eos_token_id if generation is not None else None):
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return tuple(sorted(found))


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token per character of `alphabet`, after <pad> = 0 and <eos> = 1. An unknown character raises when encoded."""
    if repeated := next((c for i, c in enumerate(alphabet) if c in alphabet[:i]), None):
        raise ConfigError(f"model.build.tokenizer_chars = {alphabet!r}: {repeated!r} appears twice; keep one")
    ids = {token: i for i, token in enumerate([PAD, EOS, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(ids))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False)


def _unique(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors without those that lie in the same place as an earlier one (tied weights)."""
    first = {(t.data_ptr(), tuple(t.shape)): name for name, t in reversed(list(tensors.items())) if t.numel()}
    return {name: t for name, t in tensors.items() if not t.numel() or first[t.data_ptr(), tuple(t.shape)] == name}


def _load(model: config.Model, dtype: torch.dtype, experts: str) -> tuple[Any, Any]:
    folder, extra = _checked(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **extra)
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **extra)
    except UNREADABLE as error:
        raise unreadable(model, error) from error
    if model.gguf_file:  # the weights are plain floats now: what is saved or sent is no quantised model
        loaded.hf_quantizer = None
        for leftover in ("quantization_config", "_pre_quantization_dtype"):
            vars(loaded.config).pop(leftover, None)
    if loaded._can_set_experts_implementation():
        loaded.set_experts_implementation(experts)
    return loaded, tokenizer


def _checked(model: config.Model) -> tuple[Path, dict[str, str]]:
    """The directory of `model.path`, and what transformers must be told. Raises ConfigError when there are no weights."""
    folder = Path(model.path)
    if not folder.is_dir():
        raise ConfigError(f"model.path = {model.path!r} is not a directory; give a Hugging Face model directory")
    if model.gguf_file and not (folder / model.gguf_file).is_file():
        raise ConfigError(f"model.gguf_file = {model.gguf_file!r} is not in {folder}; name a GGUF file there")
    if not model.gguf_file and not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise ConfigError(f"model.path = {model.path!r} has no weights (*.safetensors); set model.gguf_file or another path")
    return folder, {"gguf_file": model.gguf_file} if model.gguf_file else {}


def unreadable(model: config.Model, error: BaseException) -> ConfigError:
    """What UNREADABLE means, for `model.path`."""
    remedy = "" if isinstance(error, ImportError) else "; check the directory"
    return ConfigError(f"model.path = {model.path!r} cannot be loaded: {_one_line(error)}{remedy}")


def outline(model: config.Model) -> tuple[Any, Any]:
    """Configuration and tokenizer of what `build` makes, without its weights. Raises ConfigError, as `build` does."""
    if model.build is not None:
        return _outlined(model.build)
    folder, extra = _checked(model)
    try:
        return AutoConfig.from_pretrained(folder, **extra), AutoTokenizer.from_pretrained(folder, **extra)
    except UNREADABLE as error:
        raise unreadable(model, error) from error


def from_outline(shape: Any, dtype: torch.dtype, experts: str) -> Any:
    """A model of a configuration, its weights drawn from torch's generator. Raises ConfigError when it makes none."""
    try:
        return AutoModelForCausalLM.from_config(shape, dtype=dtype, **_kernel(shape, experts))
    except UNFIT as error:
        raise _unfit(shape.model_type, error) from error


@contextlib.contextmanager
def drawing(seed: int) -> Iterator[None]:
    """torch's generator as fresh weights of a run with this seed are drawn from it; afterwards it is what it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(seed, "model"))
        yield


def _fresh(build: config.Build, dtype: torch.dtype, experts: str, seed: int) -> tuple[Any, Any]:
    shape, tokenizer = _outlined(build)
    with drawing(seed):
        return from_outline(shape, dtype, experts), tokenizer


def _outlined(build: config.Build) -> tuple[Any, Any]:
    if build.model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"model.build.model_type = {build.model_type!r} is unknown to transformers {transformers.__version__}; "
            "try qwen3_moe, mixtral or olmoe"
        )
    if not build.tokenizer_chars:
        raise ConfigError("model.build.tokenizer_chars is empty: a built model needs an alphabet; set it")
    tokenizer = character_tokenizer(build.tokenizer_chars)
    _known(build)
    settings = {"vocab_size": len(tokenizer), **build.config}
    if settings["vocab_size"] < len(tokenizer):
        raise ConfigError(
            f"model.build.config.vocab_size = {settings['vocab_size']} is less than the {len(tokenizer)} tokens of "
            "model.build.tokenizer_chars plus <pad> and <eos>; leave it out"
        )
    settings |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    try:
        return CONFIG_MAPPING[build.model_type](**settings), tokenizer
    except UNFIT as error:
        raise _unfit(build.model_type, error) from error


def _unfit(model_type: str, error: BaseException) -> ConfigError:
    return ConfigError(f"model.build.config does not make a {model_type} model: {_one_line(error)}")


def _known(build: config.Build) -> None:
    """Raises ConfigError for a key that transformers would take and nobody would read: most often a typing error.

    Some keys that are read are no field of the configuration class (qwen3_moe's head_dim), so the model's code decides.
    """
    kind: Any = CONFIG_MAPPING[build.model_type]
    fields = {f.name for f in dataclasses.fields(kind)} | set(kind.attribute_map)
    if not (doubtful := [key for key in build.config if key not in fields]):
        return
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
    modules = [sys.modules[kind.__module__], modeling_rope_utils, *([sys.modules[model.__module__]] if model else [])]
    read = set(re.findall(r"\w+", "".join(inspect.getsource(module) for module in modules)))
    for key in doubtful:
        if key not in read:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            raise ConfigError(f"model.build.config.{key} is unknown to {build.model_type}; "
                              + (f"did you mean {near[0]!r}?" if near else "remove it"))


def _kernel(shape: Any, experts: str) -> dict[str, str]:
    """The argument that sets the expert kernel, for models that have one: a dense model refuses it."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(shape), None)
    return {"experts_implementation": experts} if kind is not None and kind._can_set_experts_implementation() else {}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
