"""Products that a policy saves are kept once, and what is made of them is not kept beside them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sac_policies import ATTENTION, MATMULS, MutationError, report, save_ops

from ._recipe import (
    Counts,
    bytes_held,
    is_plain,
    leaf,
    replays_products_with_numbers,
    run,
)

aten = torch.ops.aten


def _fused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Attention of three projections in one, two of them rotated."""
    q, k, v = (x @ w).view(2, 32, 192).chunk(3, -1)
    q, k = (torch.cat([-t[..., 32:], t[..., :32]], -1) for t in (q, k))
    return F.scaled_dot_product_attention(q[None], k[None], v[None])


def test_one_projection_of_three_stands_for_all() -> None:
    """Its storage has the others; what is rotated of them is rebuilt."""
    x, w = leaf(64, 64), leaf(64, 192)
    policy = save_ops(MATMULS, ATTENTION)
    told = report(_fused, x, w, policy=policy, engine="recipe")
    assert [each.replayed for each in told.saved if each.made_by == "CatBackward0"] == [True, True]
    assert is_plain(_fused, x, w, policy=policy)


def test_a_product_that_is_written_to_stands_for_nothing() -> None:
    """What was made of it before is kept; only the reader of the product itself is refused."""
    x, w = leaf(64, 64), leaf(64, 64)

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made = x @ w
        gate = torch.sigmoid(1.7 * made)
        unread = made * gate
        made.mul_(0.5)
        return gate.sin() + 0.0 * unread.detach()

    assert is_plain(block, x, w, policy=save_ops("aten.mm"))


class TestReconsidered:
    """What is kept in place of a product that is then kept as well is rebuilt from it after all."""

    @staticmethod
    def _quick(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made = x @ w
        return (made * torch.sigmoid(1.7 * made)) @ w

    @replays_products_with_numbers
    def test_one_of_two_is_kept(self) -> None:
        """The sigmoid is saved before the product that it is made of."""
        x, w = leaf(64, 96), leaf(96, 96)
        policy = save_ops("aten.mm")
        assert bytes_held(self._quick, x, w, policy=policy) == 64 * 96 * 4
        assert is_plain(self._quick, x, w, policy=policy)
        told = report(self._quick, x, w, policy=policy, engine="recipe")
        made = [each.replayed for each in told.saved if each.made_by == "SigmoidBackward0"]
        assert made == [True, True]

    def test_where_nobody_keeps_the_product_the_value_is_kept(self) -> None:
        """It takes no more, and no replay."""
        x, w = leaf(64, 96), leaf(96, 96)

        def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (1.5 * (x @ w)).sigmoid()

        with torch.no_grad():
            size = block(x, w).nbytes
        assert bytes_held(block, x, w, policy=save_ops("aten.mm")) in (0, size)
        ran = Counts()
        out = run(block, x, w, policy=save_ops("aten.mm"))
        with ran:
            torch.autograd.grad(out.sum(), (x, w))
        assert ran.ops[aten.sigmoid.default] == 0

    def test_a_value_that_was_written_to_is_kept(self) -> None:
        """After it was saved; backward refuses that as ever."""
        x, w = leaf(64, 96), leaf(96, 96)

        def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            made = x @ w
            gate = torch.sigmoid(1.7 * made)
            out = made * gate
            with torch.no_grad():
                gate.add_(1)
            return out

        out = run(block, x, w, policy=save_ops("aten.mm"))
        with pytest.raises(MutationError, match="was changed in place"):
            out.sum().backward()

    def test_hooks_around_hold_one_of_two(self) -> None:
        """What they were given of the other is dropped."""
        x, w = leaf(64, 96), leaf(96, 96)
        wanted = torch.autograd.grad(self._quick(x, w).sum(), (x, w))
        with torch.autograd.graph.save_on_cpu():
            out = run(self._quick, x, w, policy=save_ops("aten.mm"))
        assert all(map(torch.equal, wanted, torch.autograd.grad(out.sum(), (x, w))))
