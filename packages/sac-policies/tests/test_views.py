"""The `OpView` of an operator call, which policies read."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sac_policies.policies import OpView

MM = torch.ops.aten.mm.default


def test_every_view_has_a_region_of_its_own_by_default():
    """Calls viewed alone do not share counters."""
    one, other = OpView(MM, 0), OpView(MM, 0)
    one.region.enter(MM)
    assert other.region.calls() == {}


def test_tensors_of_an_output_are_in_order_at_any_depth():
    """In containers of any kind."""
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    view = OpView(MM, 0, (a, [None, (b, 4)], c))
    assert list(map(id, view.tensors)) == [id(a), id(b), id(c)]
    assert view.shapes == ((1,), (2,), (3,))


def test_bytes_are_those_of_all_elements_of_all_tensors():
    """Bytes of the elements, not of a view's storage."""
    half = torch.ones(8, 3, dtype=torch.float16)[:, :2]
    view = OpView(MM, 0, (half, torch.ones(5, dtype=torch.float64), None))
    assert view.out_bytes == 8 * 2 * 2 + 5 * 8
    assert view.dtypes == (torch.float16, torch.float64)


def test_unknown_output_has_no_tensors():
    """It also has no bytes."""
    view = OpView(MM, 0)
    assert (view.tensors, view.shapes, view.dtypes, view.out_bytes) == ((), (), (), 0)


def test_view_stands_in_for_torchs_context():
    """Policies are called in the forward only, with the output available."""
    out = torch.ones(1)
    view = OpView(MM, 0, out)
    assert view.is_recompute is False
    assert view.op_output is out


def test_view_cannot_be_changed():
    """A policy that modified it or its default arguments would mislead other policies."""
    view = OpView(MM, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.index = 1
    with pytest.raises(TypeError):
        view.kwargs["dim"] = 0
