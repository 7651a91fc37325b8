"""Eight-bit codes with scales: what they keep, and that encoding what was decoded changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zerokit.runtime.homes.codes import BLOCK, CodeFormat, Codes, decode

FORMATS = [
    CodeFormat(dtype, small) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2) for small in (False, True)
]
E4M3, SQUARES = CodeFormat(torch.float8_e4m3fn), CodeFormat(torch.float8_e5m2, keeps_small=True)
CPU = torch.device("cpu")


def encoded(form: CodeFormat, values: Tensor) -> Codes:
    codes = form.empty(values.numel(), CPU)
    form.encode(values, codes)
    return codes


def decoded(form: CodeFormat, codes: Codes) -> Tensor:
    out = torch.empty(codes.codes.numel())
    decode(codes, out)
    return out


def equal(one: Codes, other: Codes) -> bool:
    return torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8)) and torch.equal(
        one.scales, other.scales
    )


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Values of all magnitudes, subnormals, zeros, inf and nan among them, by their bits."""
    numel = draw(st.integers(0, 3 * BLOCK + 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        values = (
            torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(torch.int32).view(torch.float32)
        )
    else:
        exponent = draw(st.integers(-149, 127))
        values = torch.randn(numel, generator=generator).mul_(2.0 ** max(exponent, -126))
        values.mul_(2.0 ** min(exponent + 126, 0))
        values.mul_(torch.rand(numel, generator=generator).pow_(draw(st.integers(0, 12))))
    for special in draw(
        st.lists(st.sampled_from([0.0, -0.0, 1e-45, float("inf"), -float("inf"), float("nan")]))
    ):
        if numel:
            values[draw(st.integers(0, numel - 1))] = special
    return values


@settings(deadline=None, max_examples=300)
@given(tensors(), st.sampled_from(FORMATS))
def test_encoding_what_was_decoded_changes_nothing(values: Tensor, form: CodeFormat) -> None:
    codes = encoded(form, values)
    assert codes.codes.shape == values.shape
    assert codes.scales.shape == (-(-values.numel() // BLOCK),)
    assert equal(encoded(form, decoded(form, codes)), codes)


@settings(deadline=None, max_examples=100)
@given(tensors(), st.sampled_from(FORMATS), st.integers(0, 3))
def test_a_cut_at_a_multiple_of_64_changes_nothing(values: Tensor, form: CodeFormat, blocks: int) -> None:
    whole, at = encoded(form, values), min(BLOCK * blocks, values.numel())
    first, second = encoded(form, values[:at]), encoded(form, values[at:])
    assert equal(
        Codes(
            torch.cat([first.codes.view(torch.uint8), second.codes.view(torch.uint8)]).view(form.dtype),
            torch.cat([first.scales, second.scales]),
        ),
        whole,
    )


@settings(deadline=None, max_examples=200)
@given(tensors(), st.sampled_from(FORMATS))
def test_elements_are_within_half_a_step(values: Tensor, form: CodeFormat) -> None:
    back = decoded(form, encoded(form, values))
    info = torch.finfo(form.dtype)
    for start in range(0, values.numel(), BLOCK):
        block, found = values[start : start + BLOCK].double(), back[start : start + BLOCK].double()
        finite = block.isfinite()
        assert not found[~finite].isfinite().any()
        assert found[finite].isfinite().all()
        most = block[finite].abs().max().item() if finite.any() else 0.0
        step = (
            info.smallest_normal
            * info.eps
            * max(most / info.max, 2.0**-126 / (info.smallest_normal * info.eps))
        )
        bound = torch.maximum(block.abs() * info.eps * 0.5, torch.full_like(block, step)) * (1 + 2.0**-15)
        assert ((found - block).abs() <= bound)[finite].all()
        assert (found[finite & (block == 0)] == 0).all()
        if form.keeps_small:
            assert (found[finite & (block > 0)] > 0).all()


def test_a_moment_that_only_decays_decays() -> None:
    """A thousandth a step is far less than half a step of a code, yet the scale takes it over."""
    squares = torch.rand(1000).add_(0.1)
    start = squares.clone()
    for _ in range(1000):
        squares = decoded(SQUARES, encoded(SQUARES, squares * 0.999))
    assert torch.allclose(squares / start, torch.tensor(0.999**1000), rtol=0.13)


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 200_001])
def test_bytes_and_large_tensors(numel: int) -> None:
    values = torch.randn(numel)
    codes = encoded(E4M3, values)
    assert codes.nbytes == numel + 4 * -(-numel // 64)
    assert torch.allclose(decoded(E4M3, codes), values, rtol=0.0625, atol=0.02)


def test_no_element_is_lost_beside_inf_and_nan() -> None:
    values = torch.tensor([1.0, float("inf"), -2.0, float("nan"), -float("inf"), 448.0])
    back = decoded(E4M3, encoded(E4M3, values))
    assert back.isnan().tolist() == [False, True, False, True, True, False]
    assert back[[0, 2, 5]].tolist() == [1.0, -2.0, 448.0]
    assert decoded(SQUARES, encoded(SQUARES, values)).isnan().tolist() == back.isnan().tolist()
