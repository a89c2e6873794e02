"""Functions that are called again draw nothing but masks, which are drawn from their state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from sac_policies.engines.recipe.untracked._call_table import AGAIN, RandomState, operators_of

from ._recipe import bytes_kept, leaf, run


@pytest.mark.parametrize("name", sorted(AGAIN))
def test_nothing_is_drawn_again(name: str) -> None:
    """None of its operators draws random numbers."""
    tag = torch.Tag.nondeterministic_seeded
    assert [op for op in operators_of(name) if tag in op.tags] == []


def test_large_mask_is_drawn_again() -> None:
    """From a state in 2,528 bytes; what is drawn later is as without checkpointing."""
    x = leaf(1 << 12, 1 << 5)

    def dropped(t: torch.Tensor) -> torch.Tensor:
        return F.dropout(t.sin(), 0.3) * 2

    def outcome(function: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        out = function(x)
        drawn = torch.rand(2)
        return [*torch.autograd.grad(out.sum(), x), drawn]

    for _ in range(2):
        assert bytes_kept(dropped, x) < 3000
        assert all(map(torch.equal, outcome(dropped), outcome(lambda t: run(dropped, t))))


@pytest.mark.parametrize("seed", [0, -1, 2**63 + 5])
@pytest.mark.parametrize("drawn", [0, 1, 7, 1000])
def test_state_comes_back_bit_by_bit(seed: int, drawn: int) -> None:
    """After a seed, and with a normal number left over."""
    generator = torch.Generator().manual_seed(seed)
    torch.randn(drawn, generator=generator)
    torch.randn(drawn, generator=generator, dtype=torch.float64)
    state = generator.get_state()
    packed = RandomState(state)
    assert torch.equal(packed.whole(), state)
    assert packed._halves.nbytes == state.nbytes // 2


def test_state_of_another_kind_is_held_as_it_is() -> None:
    """Where halves of words say as much as the others."""
    state = torch.arange(5056, dtype=torch.int64).to(torch.uint8)
    assert torch.equal(RandomState(state).whole(), state)
