"""Where a function raises, torch's checkpoint leaves no modes and no hooks behind."""

from __future__ import annotations

import pytest
import torch

from sac_policies import _torch_compat, checkpoint, save_ops
from sac_policies.engines._engine_disabled import active


def test_failed_forward_leaves_nothing_entered():
    """While its error is held, later operators are not the region's, nor are their tensors."""
    x = torch.ones(2, 2, requires_grad=True)

    def fail(t):
        raise KeyError(t @ t)

    def inner(t):
        return checkpoint(fail, t, policy=save_ops("aten.mm"), engine="contexts")

    with pytest.raises(KeyError) as held:
        checkpoint(inner, x, policy=save_ops("aten.mm"), engine="contexts")
    assert active.modes == []
    assert _torch_compat.saved_tensor_hooks() is None
    assert held.traceback
