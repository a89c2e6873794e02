"""Low precision and scales, against blocks that are rounded one by one with torch's own casts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flat_param import ParameterError, Scaled
from flat_param.memory import _scaled_values
from flat_param.memory._scaled_values import (
    can_cast,
    check_device,
    dequantize_,
    dequantize_tiles_,
    quantize,
    quantize_tiles,
)

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
WAYS = [
    Scaled(dtype, block=4, scale_dtype=scale) for dtype in (E4M3, E5M2) for scale in (E8M0, F32)
]
LARGEST = torch.finfo(F32).max
ODD = [0.0, -0.0, 1.0, -448.0, 449.0, 57344.0, 1e-45, -1e-40, 2.0**-126, 2.0**-137, 1e30, LARGEST]


def _sent(values: Tensor, how: Scaled, dtype: torch.dtype = F32) -> Tensor:
    low, scales = quantize(values.view(-1, how.block), how)
    out = torch.full((low.shape[0], how.block), 7.0, dtype=dtype)
    dequantize_(out, low, scales)
    return out.view(-1)


def _same_bits(found: Tensor, expected: Tensor) -> bool:
    """With the sign of zeros; any NaN is a NaN."""
    same = (found == expected) & (found.signbit() == expected.signbit())
    return bool((same | (found.isnan() & expected.isnan())).all())


@pytest.mark.parametrize("how", WAYS, ids=str)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.one_of(st.floats(width=32), st.sampled_from(ODD)), min_size=8, max_size=8),
    st.sampled_from([F32, BF16, F16, F64]),
)
def test_values_are_those_of_torchs_casts(
    sent_by_hand: SimpleNamespace, how: Scaled, values: list[float], dtype: torch.dtype
) -> None:
    """Bit by bit, of any float32, in every dtype to compute in."""
    given_values = torch.tensor(values, dtype=F32)
    assert _same_bits(
        _sent(given_values, how, dtype), sent_by_hand.as_sent(given_values, how, dtype)
    )


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F64])
def test_narrow_and_double_parameters_are_taken_as_float32(
    sent_by_hand: SimpleNamespace, how: Scaled, dtype: torch.dtype
) -> None:
    """One beyond float32 is not finite there."""
    values = torch.cat([torch.randn(8, dtype=F64), torch.tensor([1e300, 1.0, -1.0, 0.0])])
    values = values.to(dtype)
    assert _same_bits(_sent(values, how), sent_by_hand.as_sent(values, how))


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("largest", [*(2.0**k for k in (-149, -130, -126, -9, 0, 9, 127)), LARGEST])
def test_nothing_leaves_the_range_of_what_is_sent(how: Scaled, largest: float) -> None:
    """The largest is within half a step of what is sent, even where torch's cast does not saturate.

    Whatever is within float8's range is sent as one that is not its NaN and not its infinity.
    """
    values = torch.tensor([largest, -largest, largest / 2, 0.0])
    low, scales = quantize(values.view(1, 4), how)
    assert low.to(F32).isfinite().all()
    assert (values / scales.to(F32)).abs().max() <= torch.finfo(how.dtype).max * (1 + 2**-23)
    if how.scale_dtype == E8M0 and largest > 2.0**-126 * torch.finfo(how.dtype).max:
        assert (values / (scales.to(F32) / 2)).abs().max() > torch.finfo(how.dtype).max


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_is_seen_and_no_other_is_touched(
    sent_by_hand: SimpleNamespace, how: Scaled, bad: float
) -> None:
    """Whether or not torch's cast saturates infinities, as 2.13 does and 2.9 does not."""
    values = torch.randn(12)
    values[5] = bad
    found = _sent(values, how)
    assert found[4:8].isnan().all()
    assert torch.equal(found[:4], sent_by_hand.as_sent(values[:4], how))
    assert torch.equal(found[8:], sent_by_hand.as_sent(values[8:], how))


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_a_block_of_zeros_stays_zero_with_its_signs(how: Scaled) -> None:
    """Its scale is one."""
    values = torch.tensor([0.0, -0.0, 0.0, -0.0])
    low, scales = quantize(values.view(1, 4), how)
    assert scales.to(F32).tolist() == [1.0]
    assert _same_bits(_sent(values, how), values)
    assert low.to(F32).signbit().tolist() == [[False, True, False, True]]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_values_that_were_sent_are_sent_again_without_a_change(dtype: torch.dtype) -> None:
    """With powers of two: rounding twice is rounding once."""
    how = Scaled(dtype, block=16)
    once = _sent(torch.randn(4096), how)
    assert torch.equal(_sent(once, how), once)


def test_the_error_is_within_half_a_step() -> None:
    """Of e4m3, three bits behind the leading one: 1/16 of an element, or a part of the largest."""
    how, values = Scaled(block=32), torch.randn(1 << 14)
    error = (_sent(values, how) - values).abs().view(-1, 32)
    largest = values.abs().view(-1, 32).amax(1, keepdim=True)
    allowed = torch.maximum(values.abs().view(-1, 32) / 16, largest * 2.0**-16)
    assert (error <= allowed).all()
    assert error.max() > 0


def test_scales_of_mxfp8_are_exponents(sent_by_hand: SimpleNamespace) -> None:
    """As torch's own float8_e8m0fnu has them, for every exponent there is."""
    largest = 2.0 ** torch.arange(-126, 128).to(F32)
    _, scales = quantize(largest.view(-1, 1), Scaled(block=1))
    by_hand = [sent_by_hand.scale_of(each, Scaled()) for each in largest.tolist()]
    assert scales.dtype == E8M0
    assert scales.to(F32).tolist() == by_hand
    assert scales.view(torch.uint8).tolist() == [int(math.log2(each)) + 127 for each in by_hand]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("exponent", [-100, -1, 0, 1, 100])
def test_a_scale_grows_where_the_range_ends(dtype: torch.dtype, exponent: int) -> None:
    """At the largest that fits it is the least; one step of float32 beyond, twice that."""
    fits = torch.tensor(torch.finfo(dtype).max * 2.0**exponent)
    beyond = fits.nextafter(torch.tensor(torch.inf))
    _, scales = quantize(torch.stack([fits, beyond]).view(2, 1), Scaled(dtype, block=1))
    assert scales.to(F32).tolist() == [2.0**exponent, 2.0 ** (exponent + 1)]


@pytest.mark.parametrize("shape", [(300, 260), (128, 128), (1, 1), (127, 300), (256, 130)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_tiles_are_those_of_a_padded_matrix(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """DeepSeek's: filled up to whole tiles, each divided by its largest element over 448."""
    how, (rows, columns) = Scaled(block=(128, 128), scale_dtype=F32), shape
    weight = torch.randn(shape) * torch.logspace(-9, 9, columns)
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    tiles = padded.view(-(-rows // 128), 128, -(-columns // 128), 128)
    scales = tiles.abs().amax((1, 3), keepdim=True) / 448
    rounded = (tiles / scales).to(E4M3)
    low, found = quantize_tiles(weight[None], how)
    assert torch.equal(found[0], scales[:, 0, :, 0])
    expected = rounded.view(padded.shape)[:rows, :columns]
    assert torch.equal(low[0].view(torch.uint8), expected.view(torch.uint8))
    out = torch.full((1, *shape), 7.0, dtype=dtype)
    dequantize_tiles_(out, low, found, how)
    whole = (rounded.to(F32) * scales).view(padded.shape)[:rows, :columns]
    assert torch.equal(out[0], whole.to(dtype))


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("how", WAYS, ids=str)
def test_a_device_has_the_bits_of_the_host(how: Scaled) -> None:
    """Of what is sent, of scales, and of what arrives."""
    device = torch.accelerator.current_accelerator()
    values = torch.randn(64, 4) * 10.0 ** torch.randint(-30, 30, (64, 1))
    here, there = quantize(values, how), quantize(values.to(device), how)
    for mine, other in zip(here, there, strict=True):
        assert torch.equal(mine.view(torch.uint8), other.cpu().view(torch.uint8))
    outs = torch.empty(64, 4), torch.empty(64, 4, device=device)
    for out, (low, scales) in zip(outs, (here, there), strict=True):
        dequantize_(out, low, scales)
    assert torch.equal(outs[0], outs[1].cpu())


def test_no_blocks_are_no_values() -> None:
    """A rank may have nothing."""
    low, scales = quantize(torch.empty(0, 32), Scaled())
    assert (low.shape, scales.shape) == ((0, 32), (0,))


def test_a_device_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, with what is instead."""
    check_device(Scaled(), torch.device("cpu"))
    monkeypatch.setattr(_scaled_values, "can_cast", lambda dtype, _: dtype != E8M0)
    words = "on cpu and sent in torch.float8_e8m0fnu, but torch .* cannot cast .* use param_dtype"
    with pytest.raises(ParameterError, match=words):
        check_device(Scaled(), torch.device("cpu"))
    check_device(Scaled(scale_dtype=F32), torch.device("cpu"))


def test_flushed_subnormals_change_no_scale(request: Any) -> None:
    """Scales are normal numbers, so blocks of tiny elements are zeros then, and nothing worse."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    request.addfinalizer(lambda: torch.set_flush_denormal(False))
    for how in WAYS:
        assert _sent(torch.tensor([1e-40, -1e-45, 2.0**-126, 0.0]), how).isfinite().all()


class _NoFloat8:
    """A tensor on a device that lacks a kernel."""

    def to(self, dtype: torch.dtype) -> None:
        raise RuntimeError(f'"copy_" not implemented for {dtype}')


def test_float8_is_cast_to_where_torch_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it can; where the cast fails, or gives something else, it cannot."""
    device = torch.device("cpu")
    assert can_cast(torch.float8_e4m3fn, device)
    assert can_cast(torch.float8_e8m0fnu, device)
    assert can_cast(torch.float8_e4m3fn, torch.device("meta"))
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.full((1,), 3.0))
    assert not can_cast(torch.float8_e4m3fn, device)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: _NoFloat8())
    assert not can_cast(torch.float8_e4m3fn, device)
