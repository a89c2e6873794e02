"""Code runs again with the random numbers and autocast it had, and others go on as they are."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from sac_policies.eager._ambient_state import AmbientState


def test_random_numbers_are_those_of_then_and_go_on_from_now() -> None:
    """Inside, and after it."""
    torch.manual_seed(0)
    ambient = AmbientState([torch.ones(2)])
    first = torch.rand(3)
    ambient.settle()
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    with ambient.restored():
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.rand(3), wanted)


def test_where_none_were_drawn_the_state_is_let_go() -> None:
    """It takes 5 KB; others may be drawn inside then, as they come."""
    ambient = AmbientState([])
    ambient.settle()
    state = torch.get_rng_state()
    with ambient.restored():
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(1)
    assert not torch.equal(torch.get_rng_state(), state)


def test_autocast_is_that_of_then() -> None:
    """On or off, and its dtype."""
    with torch.autocast("cpu", dtype=torch.float16):
        on = AmbientState([])
    off = AmbientState([])
    for ambient, dtype in ((on, torch.float16), (off, torch.float32)):
        with torch.autocast("cpu", dtype=torch.bfloat16), ambient.restored():
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is dtype


def test_where_nothing_is_another_nothing_is_done() -> None:
    """No context is entered, which takes longer than many a region."""
    ambient = AmbientState([])
    ambient.settle()
    assert isinstance(ambient.restored(), nullcontext)
    with torch.autocast("cpu"):
        assert not isinstance(ambient.restored(), nullcontext)
