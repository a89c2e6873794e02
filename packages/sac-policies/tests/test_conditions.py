"""Code runs again with the random numbers and autocast it had, and leaves the rest as it was."""

from __future__ import annotations

import torch
from torch import nn

from sac_policies.engines.recipe.regions._conditions import Conditions, Undone


def test_random_numbers_are_those_of_then_and_go_on_from_now() -> None:
    """Inside, and after it."""
    torch.manual_seed(0)
    conditions = Conditions([torch.ones(2)])
    first = torch.rand(3)
    conditions.settle()
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    with conditions.restored():
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.rand(3), wanted)


def test_where_none_were_drawn_the_state_is_let_go() -> None:
    """It takes 5 KB; others may be drawn inside then, as they come."""
    conditions = Conditions([])
    conditions.settle()
    state = torch.get_rng_state()
    with conditions.restored():
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(1)
    assert not torch.equal(torch.get_rng_state(), state)


def test_autocast_is_that_of_then() -> None:
    """On or off, and its dtype."""
    with torch.autocast("cpu", dtype=torch.float16):
        on = Conditions([])
    off = Conditions([])
    for conditions, dtype in ((on, torch.float16), (off, torch.float32)):
        with torch.autocast("cpu", dtype=torch.bfloat16), conditions.restored():
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is dtype


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
