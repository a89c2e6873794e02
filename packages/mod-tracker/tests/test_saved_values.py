"""What nodes keep for backward, and what torch's checkpoint keeps beside them."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from mod_tracker._torch_compat import SAVED, saved_values, value_in

pytestmark = pytest.mark.skipif(
    not hasattr(SAVED, "data"), reason="a node of torch 2.9 does not show what it keeps"
)


class Packed:
    """What hooks made of a tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


def found(output):
    """Types of what is kept behind a tensor, with whether hooks and a checkpoint were there."""
    return [
        (type(data), hook is not None, of_checkpoint)
        for data, hook, of_checkpoint in saved_values([output])
    ]


def test_tensors_are_kept_until_a_backward_has_used_them():
    """By all nodes on the way; a leaf and what needs no gradient have none."""
    output = torch.ones(3, requires_grad=True).exp().sin()
    assert found(output) == [(torch.Tensor, False, False)] * 2
    output.sum().backward()
    assert found(output) == found(torch.ones(3)) == []


def test_what_hooks_made_is_seen_with_the_hook():
    """Which makes the tensor again."""
    with saved_tensors_hooks(lambda tensor: Packed(tensor.detach()), lambda kept: kept.tensor):
        output = torch.ones(3, requires_grad=True).exp()
    ((data, hook, _),) = saved_values([output])
    assert type(data) is Packed
    assert hook(data) is data.tensor


def test_a_reentrant_checkpoint_keeps_its_input_by_a_node():
    """Which is told from other nodes."""
    given = torch.ones(3, requires_grad=True) + 2
    assert found(checkpoint(torch.sin, given, use_reentrant=True)) == [(torch.Tensor, False, True)]


def test_class_that_refuses_is_no_obstacle():
    """It keeps nothing that could be asked for."""

    class Refusing(torch.Tensor):
        grad_fn = property(lambda self: 1 // 0)

    assert found(torch.ones(2).as_subclass(Refusing)) == []


def test_what_shows_nothing_keeps_nothing():
    """As on an older torch."""
    assert list(value_in(object(), of_checkpoint=False)) == []
