"""Contexts engine: leaves that others write to between forward and backward are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sac_policies import MutationError, checkpoint, recompute_all, save_ops


def _run(layer: nn.Module, x: torch.Tensor, change, policy) -> list[torch.Tensor]:
    out = checkpoint(lambda t: layer(t).tanh(), x, policy=policy, engine="contexts")
    with torch.no_grad():
        change()
    return list(torch.autograd.grad(out.sum(), [*layer.parameters(), x]))


@pytest.mark.parametrize("policy", [recompute_all(), save_ops("aten.addmm"), save_ops("aten.tanh")])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_changed_parameter_is_refused(name, policy):
    """A step of an optimizer between forward and backward is no silent wrong gradient."""
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    with pytest.raises(
        MutationError,
        match=r"sac_policies\.checkpoint: tensor of shape \(4.*\) was changed in place after the "
        r"region read it, but aten\..* of the recomputation reads it as it was \(read at .*\)\. "
        r"Change it after backward\.",
    ):
        _run(layer, x, lambda: getattr(layer, name).mul_(0.5), policy)


def test_changed_buffer_is_refused():
    """A tensor that needs no gradient is read again too."""
    scale, x = torch.ones(4), torch.ones(2, 4, requires_grad=True)
    out = checkpoint(lambda t: (t * scale).sin(), x, policy=recompute_all(), engine="contexts")
    scale.mul_(2)
    with pytest.raises(MutationError, match=r"shape \(4,\) was changed in place"):
        out.sum().backward()


@pytest.mark.parametrize("train", [True, False])
def test_what_the_region_writes_itself_is_not_refused(train, equal):
    """Running statistics and counters change in the forward, and again in the recomputation."""
    x = torch.randn(8, 4, requires_grad=True)
    layer = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).train(train)
    found = _run(layer, x, lambda: None, recompute_all())
    wanted = torch.autograd.grad(layer(x).tanh().sum(), [*layer.parameters(), x])
    assert equal(found, list(wanted))
    layer(x)
    assert equal(_run(layer, x, lambda: layer(x) if train else None, recompute_all()), found)


def test_what_the_recomputation_does_not_reach_may_change(equal):
    """Only what is read again matters: the last bias of a region is not."""
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    shift = torch.zeros(4)

    def run(region: bool) -> list[torch.Tensor]:
        def function(t):
            return layer(t).tanh() + shift

        policy, engine = recompute_all(), "contexts"
        out = checkpoint(function, x, policy=policy, engine=engine) if region else function(x)
        shift.add_(1)
        return list(torch.autograd.grad(out.sum(), [*layer.parameters(), x]))

    assert equal(run(False), run(True))


def test_masks_of_a_recomputation_inside_the_forward_are_its_own(equal):
    """A gradient taken in the region recomputes what ran so far; nothing of that is refused."""
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)

    def function(t):
        y = nn.functional.dropout(layer(t).sin(), 0.3)
        (inner,) = torch.autograd.grad(y.sum(), t, retain_graph=True)
        return y * inner

    results = []
    for region in (False, True):
        torch.manual_seed(0)
        out = (
            checkpoint(function, x, policy=recompute_all(), engine="contexts")
            if region
            else function(x)
        )
        results.append(list(torch.autograd.grad(out.sum(), [*layer.parameters(), x])))
    assert equal(*results)
