"""A patch rebuilds a tensor's exact bits, whatever they are, and refuses what it was not made for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import patch
from slipstream.errors import InvalidInput


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, bytes, bytes]:
    """A dtype with two tensors of arbitrary bits, NaNs and -0 included: some elements change by an ulp, some by their sign."""
    dtype = draw(st.sampled_from(sorted(patch.WIDTHS)))
    bits, random = np.dtype(f"u{patch.WIDTHS[dtype]}"), np.random.default_rng(draw(st.integers(0, 2**32)))
    old = random.integers(0, np.iinfo(bits).max, draw(st.integers(0, 3000)), bits, endpoint=True)
    new = old.copy()
    sign = bits.type(1 << (8 * bits.itemsize - 1))
    for share, changed in ((draw(st.floats(0, 1)), old + 1), (draw(st.floats(0, 0.1)), old ^ sign)):
        chosen = random.random(len(old)) < share
        new[chosen] = changed[chosen]
    return dtype, old.tobytes(), new.tobytes()


@settings(max_examples=150, deadline=None)
@given(tensors())
def test_what_a_patch_rebuilds_has_the_same_bits(case: tuple[str, bytes, bytes]) -> None:
    dtype, old, new = case
    made = patch.encode(old, new, dtype)
    assert made is not None and patch.decode(old, made, dtype) == new


def test_far_apart_and_far_away_elements_are_escaped() -> None:
    old = np.zeros(1 << 20, "<u2")
    new = old.copy()
    new[[0, 254, 509, 510, 70_000, (1 << 20) - 1]] = [1, 0x8000, 0x7F80, 255, 0xFFFF, 300]
    made = patch.encode(old.tobytes(), new.tobytes(), "BF16")
    assert made is not None and len(made) < 120 and patch.decode(old.tobytes(), made, "BF16") == new.tobytes()


def test_one_ulp_of_one_element_in_a_hundred_takes_a_hundredth_of_the_tensor() -> None:
    """Ten bits each; a list of 32-bit indices and 16-bit values would take three times as much."""
    random = np.random.default_rng(0)
    old = random.standard_normal(1 << 20, np.float32).view("<u4") >> 16
    old = old.astype("<u2")
    new = old + (random.random(len(old)) < 0.01) * random.choice([1, -1], len(old))
    made = patch.encode(old.tobytes(), new.astype("<u2").tobytes(), "BF16")
    assert made is not None and len(made) < 0.0075 * old.nbytes


def test_what_is_no_patch_is_none() -> None:
    old, new = bytes(2000), bytes([1, 0]) * 1000
    assert patch.encode(old, new, "BF16", most=0.5) is None
    assert patch.encode(old, new, "I16") is None
    assert patch.encode(old, new[:-2], "BF16") is None


def test_a_damaged_patch_is_refused() -> None:
    old = np.arange(4000, dtype="<u2")
    made = patch.encode(old.tobytes(), (old + (old % 7 == 0)).astype("<u2").tobytes(), "BF16")
    assert made is not None
    for damaged in (made[:-1], made[:10], made + b"x", b"\x04" + made[1:], made[:30] + b"\xff" + made[31:]):
        with pytest.raises(InvalidInput, match="patch"):
            patch.decode(old.tobytes(), damaged, "BF16")
    with pytest.raises(InvalidInput, match="patch"):
        patch.decode(old[:3000].tobytes(), made, "BF16")
