"""What a strategy frees, and in which dtype a unit computes, sums and keeps gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flat_param import LayoutError, MixedPrecision, Strategy

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
NOT_CAST = (torch.int64, torch.uint8, torch.bool, torch.complex64)


@pytest.mark.parametrize(
    ("name", "frees"),
    [("NO_SHARD", False), ("SHARD_GRAD_OP", False), ("FULL_SHARD", True), ("HYBRID_SHARD", True)],
)
def test_whole_parameters_are_dropped_between_forward_and_backward(name: str, frees: bool) -> None:
    """As the table says, and a strategy is its name, so that either can be passed."""
    assert Strategy(name).frees_after_forward is frees
    assert Strategy(name) == name


def test_strategies_are_these_four() -> None:
    """The table has a row for each, and another word is refused."""
    assert [strategy.value for strategy in Strategy] == [
        "NO_SHARD",
        "SHARD_GRAD_OP",
        "FULL_SHARD",
        "HYBRID_SHARD",
    ]
    rows = [line.split("|")[1] for line in str(Strategy.__doc__).splitlines() if "| " in line][1:]
    assert [row.split()[0] for row in rows] == [strategy.value for strategy in Strategy]
    with pytest.raises(LayoutError, match=r"'full_shard', but it must be one of 'NO_SHARD', "):
        Strategy("full_shard")


@pytest.mark.parametrize(
    ("param", "reduce", "keep", "expected"),
    [
        (None, None, False, (F32, F32, F32)),
        (None, None, True, (F32, F32, F32)),
        (BF16, None, False, (BF16, BF16, F32)),
        (BF16, None, True, (BF16, BF16, BF16)),
        (None, F64, False, (F32, F64, F32)),
        (None, F64, True, (F32, F64, F64)),
        (BF16, F64, False, (BF16, F64, F32)),
        (BF16, F64, True, (BF16, F64, F64)),
    ],
)
def test_dtypes_of_a_float32_parameter(
    param: torch.dtype | None,
    reduce: torch.dtype | None,
    keep: bool,
    expected: tuple[torch.dtype, ...],
) -> None:
    """Computing, summing and `.grad`: each falls back on the one before, `.grad` on its own."""
    precision = MixedPrecision(param, reduce, keep_low_precision_grads=keep)
    found = precision.compute_dtype(F32), precision.reduction_dtype(F32), precision.grad_dtype(F32)
    assert found == expected


@pytest.mark.parametrize("dtype", NOT_CAST, ids=str)
def test_what_is_not_floating_point_is_never_cast(dtype: torch.dtype) -> None:
    """An index or a mask in bfloat16 would be another one, and a complex number lose its half."""
    precision = MixedPrecision(BF16, F64, keep_low_precision_grads=True)
    assert precision.compute_dtype(dtype) is dtype
    assert precision.reduction_dtype(dtype) is dtype
    assert precision.grad_dtype(dtype) is dtype


def test_parameters_of_two_dtypes_compute_in_one() -> None:
    """A unit's bfloat16 parameters are cast up as its float64 ones are cast down."""
    precision = MixedPrecision(param_dtype=F32)
    assert {precision.compute_dtype(dtype) for dtype in (BF16, F32, F64)} == {F32}
    assert [precision.grad_dtype(dtype) for dtype in (BF16, F32, F64)] == [BF16, F32, F64]


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.complex64])
def test_dtypes_that_nothing_computes_in_are_refused(name: str, dtype: torch.dtype) -> None:
    """With what sends parameters in float8, which has scales."""
    with pytest.raises(LayoutError) as raised:
        MixedPrecision(**{name: dtype})
    assert str(raised.value) == (
        f"flat_param.MixedPrecision: {name} is {dtype}, but torch computes in floating point of "
        "16 bits or more. Use torch.bfloat16."
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"param_dtype": "bf16"}, "param_dtype is 'bf16', but torch computes in"),
        ({"reduce_dtype": 16}, "reduce_dtype is 16, but torch computes in"),
    ],
)
def test_what_is_no_dtype_or_scaling_is_refused(given: dict[str, Any], text: str) -> None:
    """By the name of the field."""
    with pytest.raises(LayoutError, match=text):
        MixedPrecision(**given)
