"""The products and the C kernel of a fast decode pass are attention: equal to torch's fused kernel, which serves others."""

import shutil

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from services.rollout import attention, native
from services.rollout.decoder import Decoder
from slipstream import config, model
from slipstream.errors import ConfigError

BUILD = config.Build(
    model_type="qwen3_moe", tokenizer_chars="01", config={
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8})


has_compiler = pytest.mark.skipif(not any(map(shutil.which, native.COMPILERS)), reason="no C compiler")
KERNELS = [attention.one_query, pytest.param(attention.one_query_native, marks=has_compiler)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def layer(group: int) -> nn.Module:
    module = nn.Module()
    module.num_key_value_groups = group
    return module


def pass_of(queries: int, heads: int = 6, kinds: int = 3) -> tuple[torch.Tensor, ...]:
    """Query, key, value and mask; keys and values are slices of a longer cache, each row sees a prefix of its own."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(5, heads, queries, 8, generator=generator)
    key, value = (torch.randn(7, kinds, 32, 8, generator=generator)[:5, :, :24] for _ in range(2))
    seen = torch.arange(24) <= torch.arange(3, 23, 4)[:, None, None, None].expand(5, 1, queries, 1)
    return query, key, value, torch.where(seen, 0.0, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("kinds", [1, 2, 6])
@pytest.mark.parametrize("kernel", KERNELS)
def test_one_query_is_the_fused_kernel(kernel, kinds):
    inputs = pass_of(1, 6, kinds)
    mine, _ = kernel(layer(6 // kinds), *inputs, scaling=0.3)
    fused, _ = sdpa_attention_forward(layer(6 // kinds), *inputs, scaling=0.3)
    assert mine.shape == fused.shape
    torch.testing.assert_close(mine, fused, rtol=0, atol=2e-6)


@pytest.mark.parametrize("queries, more", [(4, {}), (1, {"position_bias": torch.ones(5, 6, 1, 24)})])
def test_everything_else_goes_to_transformers(queries, more):
    inputs = pass_of(queries)
    fused, _ = sdpa_attention_forward(layer(2), *inputs, scaling=0.3, **more)
    for kernel in (attention.one_query, attention.one_query_native):
        mine, _ = kernel(layer(2), *inputs, scaling=0.3, **more)
        assert torch.equal(mine, fused)


@has_compiler
@pytest.mark.parametrize("dim, width", [(32, 32), (64, 64), (128, 128), (24, 40)])
def test_the_kernel_reads_what_the_mask_shows(dim, width):
    """Rows of their own length, a window that hides their beginning, heads of any width, scores from -60 to 60: each is
    softmax, what the mask shows is added to, and what it hides may be anything, not a number included."""
    generator = torch.Generator().manual_seed(dim)
    shapes = ((6, 9, 1, dim), (6, 3, 40, dim), (6, 3, 40, width))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    scaling = 20 / dim**0.5
    at, last = torch.arange(40), torch.tensor([0, 3, 17, 21, 38, 39])[:, None]
    seen = (at <= last) & (at > last - 16)
    mask = torch.where(seen, torch.randn(6, 40, generator=generator), torch.finfo(torch.float32).min)[:, None, None]
    expected, _ = sdpa_attention_forward(layer(3), query, key, value, mask, scaling=scaling)
    hidden = torch.where(seen[:, None, :, None], 0.0, float("nan"))
    mine, _ = attention.one_query_native(layer(3), query, key + hidden, value + hidden, mask, scaling=scaling)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)


def test_keys_that_are_not_dense_go_to_the_products():
    """The kernel reads a key as one run of numbers."""
    query, key, value, mask = pass_of(1)
    key = key.transpose(2, 3).contiguous().transpose(2, 3)
    mine, _ = attention.one_query_native(layer(2), query, key, value, mask, scaling=0.3)
    products, _ = attention.one_query(layer(2), query, key, value, mask, scaling=0.3)
    assert torch.equal(mine, products)


def test_without_a_compiler_the_products_serve_or_the_setting_is_refused(monkeypatch):
    """rollout.compile = "auto" asks for nothing that is not there; "attention" names what is missing."""
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    native.kernel.cache_clear()
    built, _ = model.build(config.Model(build=BUILD), 0)
    Decoder(built, 4, 16, compiled="auto")
    assert built.config._attn_implementation == attention.NAME
    with pytest.raises(ConfigError, match=r"rollout.compile needs a C compiler.*cc, gcc, clang"):
        Decoder(model.build(config.Model(build=BUILD), 0)[0], 4, 16, compiled="attention")


@pytest.mark.parametrize("threads, expected", [(1, attention.NATIVE), (2, attention.NAME)])
@has_compiler
def test_more_threads_keep_the_products(threads, expected):
    """The kernel has one thread."""
    torch.set_num_threads(threads)
    built, _ = model.build(config.Model(build=BUILD), 0)
    Decoder(built, 4, 16, compiled="auto")
    assert built.config._attn_implementation == expected


@pytest.mark.parametrize("deterministic, expected", [(False, attention.NAME), (True, "sdpa")])
def test_only_the_fast_decoder_uses_it(deterministic, expected):
    built, _ = model.build(config.Model(build=BUILD), 0, deterministic)
    Decoder(built, 4, 16, deterministic=deterministic)
    assert built.config._attn_implementation == expected


@has_compiler
def test_a_library_that_others_may_replace_is_not_loaded(monkeypatch, tmp_path):
    (tmp_path / "slipstream").mkdir(mode=0o777)
    (tmp_path / "slipstream").chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="others may write to"):
        native.kernel.__wrapped__()
    (tmp_path / "slipstream").chmod(0o700)
    assert native.kernel.__wrapped__()


@has_compiler
def test_a_folder_that_cannot_be_used_leaves_the_products(monkeypatch, tmp_path):
    """A read-only disk, or one from which nothing may be run, ends no start that asked for nothing."""
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    native.kernel.cache_clear()
    built, _ = model.build(config.Model(build=BUILD), 0)
    Decoder(built, 4, 16, compiled="auto")
    assert built.config._attn_implementation == attention.NAME
    with pytest.raises(ConfigError, match="cannot be used"):
        Decoder(model.build(config.Model(build=BUILD), 0)[0], 4, 16, compiled="attention")
    native.kernel.cache_clear()
