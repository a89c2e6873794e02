"""Code runs again with the random numbers and autocast it had, and leaves the rest as it was."""

from __future__ import annotations

import torch
from torch import nn

from sac_policies.engines.recipe.regions._conditions import Conditions, Undone


def test_writes_to_what_was_there_are_undone() -> None:
    """With their version, and also those that no schema tells of; what is made meanwhile is not."""
    there, norm = torch.zeros(4), nn.BatchNorm1d(4)
    undone = Undone()
    with undone:
        there.add_(1)
        there[1:].mul_(3)
        made = torch.ones(4)
        made.add_(there)
        norm(torch.randn(8, 4))
    version = made._version
    undone.undo()
    assert torch.equal(there, torch.zeros(4))
    assert there._version == 0
    assert torch.equal(norm.running_mean, torch.zeros(4))
    assert norm.num_batches_tracked == 0
    assert made.tolist() == [2, 4, 4, 4]
    assert made._version == version


def test_hooks_are_not_registered() -> None:
    """What would be given back can be removed."""
    leaf, seen = torch.ones(2, requires_grad=True), []
    with Conditions([]).restored():
        leaf.register_hook(seen.append).remove()
        leaf.register_post_accumulate_grad_hook(seen.append)
    leaf.sum().backward()
    assert seen == []
