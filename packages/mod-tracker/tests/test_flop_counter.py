"""Counting from shapes: what an amount depends on, and formulas."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from mod_tracker import profile_flops
from mod_tracker.reports._flop_counter import shape_key


def test_flops_of_different_shapes_are_not_mixed_up():
    """The count kept per shape is used for that shape only."""
    layer = nn.Linear(4, 4, bias=False)
    with profile_flops() as report:
        for rows in (1, 2, 3, 2, 1):
            layer(torch.ones(rows, 4))
    assert report["Linear"].forward == 2 * 16 * (1 + 2 + 3 + 2 + 1)


GROUPED = {
    "rows in groups": ((8, 16), (2, 16, 32), [3, 8], 8 * 16 * 32),
    "pairs": ((2, 8, 16), (2, 16, 32), None, 2 * 8 * 16 * 32),
    "columns in groups": ((2, 8, 16), (16, 32), [16, 32], 8 * 16 * 32),
    "what is summed in groups": ((8, 16), (16, 32), [8, 16], 8 * 16 * 32),
}


@pytest.mark.skipif(
    not hasattr(torch.nn.functional, "grouped_mm"), reason="has no public products of groups"
)
@pytest.mark.parametrize("fake", [False, True], ids=["data", "fake"])
@pytest.mark.parametrize("name", GROUPED)
def test_products_of_groups_are_counted_as_what_they_are(name, fake):
    """Forward and the gradients of both matrices, which are such products again."""
    first, second, ends, pairs = GROUPED[name]
    with FakeTensorMode() if fake else nullcontext():
        ends = ends and torch.tensor(ends, dtype=torch.int32)
        one, other = (
            torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in (first, second)
        )
        with profile_flops() as report:
            nn.functional.grouped_mm(one, other, offs=ends).square().sum().backward()
    assert report.by_operator == {"aten._grouped_mm.default": 3 * 2 * pairs}


def test_flops_of_a_list_of_tensors_are_counted_each_time():
    """What a list holds is not in the arguments' shapes, so nothing is taken from before."""
    formulas = {torch.ops.aten.cat: lambda tensors, *_, out_shape: out_shape[0]}
    with profile_flops(formulas=formulas) as report:
        for size in (2, 3):
            torch.cat([torch.ones(size), torch.ones(size)])
    assert report.total == 4 + 6


def test_what_could_hold_a_tensor_is_no_key():
    """Plain values and shapes are; a tensor itself would be compared element by element."""
    tensor = torch.ones(2, 3)
    assert shape_key(len, (tensor, None, 1, [2, 3]), {"n": 0.5}) == (
        *(len, (2, 3), None, 1, (2, 3), 0.5),
        "n",
    )
    for value in ((tensor,), [tensor], object(), torch.float32):
        assert shape_key(len, (value,), {}) is None
