"""Calls that made values without a gradient are made again of what they were given then."""

from __future__ import annotations

import pytest
import torch

from sac_policies import MutationError

from ._recipe import bytes_held, leaf, run

pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")

ROWS, WIDTH = 512, 16


def test_random_numbers_are_not_made_again() -> None:
    """Nor what is made of them when they are gone."""
    x = leaf(ROWS, WIDTH)

    def noisy(t: torch.Tensor) -> torch.Tensor:
        return t * (torch.rand(ROWS, WIDTH) + 1).sin()

    assert bytes_held(noisy, x) == ROWS * WIDTH * 4
    torch.manual_seed(1)
    expected = torch.autograd.grad(noisy(x).sum(), x)
    torch.manual_seed(1)
    assert torch.equal(torch.autograd.grad(run(noisy, x).sum(), x)[0], expected[0])


def test_small_operand_may_be_written_to() -> None:
    """It was copied."""
    given = torch.arange(64)
    x = leaf(ROWS, WIDTH)

    def chosen(t: torch.Tensor) -> torch.Tensor:
        return t[(given[:, None] + given).flatten() // 2]

    expected = torch.autograd.grad(chosen(x).sin().sum(), x)
    out = run(lambda t: chosen(t).sin(), x)
    given.add_(5)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected[0])


def test_large_operand_that_was_written_to_is_an_error() -> None:
    """Seen by its version, and past that by the proof."""
    given = torch.arange(1 << 14).view(-1, 2) % 8
    x = leaf(ROWS, 32)

    def made(t: torch.Tensor) -> torch.Tensor:
        return t.sum() * (given.float().repeat(1, 4) + 1)

    for write in (lambda: given.add_(1), lambda: given.data.add_(1)):
        out = run(made, x)
        write()
        with pytest.raises(MutationError):
            torch.autograd.grad(out.sum(), x)


def test_value_that_was_written_to_is_an_error() -> None:
    """As in plain autograd."""
    indices: list[torch.Tensor] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        at = torch.arange(ROWS) // 2
        indices.append(at)
        return t[at].sin()

    out = run(function, leaf(ROWS, WIDTH))
    indices[-1].add_(1)
    with pytest.raises(MutationError, match="changed in place after it was saved"):
        out.sum().backward()
