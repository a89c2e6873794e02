"""Functions that are called again draw nothing but masks, which are drawn from their state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from sac_policies.engines.recipe.untracked._call_table import AGAIN, operators_of

from ._recipe import bytes_kept, leaf, run


@pytest.mark.parametrize("name", sorted(AGAIN))
def test_nothing_is_drawn_again(name: str) -> None:
    """None of its operators draws random numbers."""
    tag = torch.Tag.nondeterministic_seeded
    assert [op for op in operators_of(name) if tag in op.tags] == []


def test_large_mask_is_drawn_again() -> None:
    """From a state of 5,056 bytes; what is drawn later is as without checkpointing."""
    x = leaf(1 << 12, 1 << 5)

    def dropped(t: torch.Tensor) -> torch.Tensor:
        return F.dropout(t.sin(), 0.3) * 2

    def outcome(function: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        out = function(x)
        drawn = torch.rand(2)
        return [*torch.autograd.grad(out.sum(), x), drawn]

    for _ in range(2):
        assert bytes_kept(dropped, x) < 6000
        assert all(map(torch.equal, outcome(dropped), outcome(lambda t: run(dropped, t))))
