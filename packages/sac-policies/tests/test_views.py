"""The `OpView` of an operator call, which policies read."""

from __future__ import annotations

import pytest
import torch

from sac_policies.policies import OpView

MM = torch.ops.aten.mm.default


def test_bytes_are_those_of_all_elements_of_all_tensors():
    """Bytes of the elements at any depth, not of a view's storage."""
    half = torch.ones(8, 3, dtype=torch.float16)[:, :2]
    view = OpView(MM, 0, (half, [torch.ones(5, dtype=torch.float64), (4, None)]))
    assert view.out_bytes == 8 * 2 * 2 + 5 * 8
    assert OpView(MM, 0).out_bytes == 0


def test_view_cannot_be_changed():
    """A policy that modified it or its default arguments would mislead other policies."""
    view = OpView(MM, 0)
    with pytest.raises(AttributeError):
        view.index = 1
    with pytest.raises(TypeError):
        view.kwargs["dim"] = 0
