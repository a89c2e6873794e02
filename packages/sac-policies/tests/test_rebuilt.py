"""A value is rebuilt once for all its readers, from leaves, from what is kept, or by replays."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from sac_policies import RecomputeError, save_ops
from sac_policies.engines.recipe import _rebuilt
from sac_policies.engines.recipe._proof import proof_of
from sac_policies.engines.recipe._rebuilt import rebuilt
from sac_policies.engines.recipe._shared_values import SharedValue, Source

from ._recipe import Counts, W, bytes_held, is_plain, leaf, run

aten = torch.ops.aten

pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")


def test_kept_value_is_read_and_not_made_again() -> None:
    """What one operator saved of a product serves the sum that another saved."""
    x = leaf(6, 6)

    def body(t: torch.Tensor) -> torch.Tensor:
        y = t @ W
        return y.sin() + (y + t).cos()

    assert bytes_held(body, x, policy=save_ops("aten.mm")) == 144
    out = run(body, x, policy=save_ops("aten.mm"))
    with Counts() as counts:
        out.sum().backward()
    assert counts.ops[aten.mm.default] == 2


def test_operand_of_several_replays_is_made_once_and_dropped() -> None:
    """Two values read one sum that nobody saved; with the second it goes."""
    x = leaf(6, 6)

    def body(t: torch.Tensor) -> torch.Tensor:
        y = t + t.cos()
        return (y * 2.0).sin() + (y * 3.0).cos() + y.neg().sigmoid()

    out = run(body, x)
    with Counts() as counts:
        torch.autograd.grad(out.sum(), x, retain_graph=True)
        seen = [ref() is None for ref in counts.sums]
    # One replay of the sum; the rest add gradients up.
    plain = body(x)
    with Counts() as without:
        torch.autograd.grad(plain.sum(), x)
    assert counts.ops[aten.add.Tensor] == without.ops[aten.add.Tensor] + 1
    assert seen.count(False) <= 1  # the gradient itself
    assert is_plain(body, x)


def test_parameter_without_data_is_an_error_that_says_so() -> None:
    """What frees parameters between forward and backward frees what a replay reads."""
    x, w = leaf(6, 6), leaf(6, 6)
    out = run(lambda t: (t + w).sin(), x)
    w.untyped_storage().resize_(0)
    with pytest.raises(RecomputeError, match=r"parameter of shape \(6, 6\) has no data"):
        out.sum().backward()


class Unseen(Exception):
    """The caller's own."""


def test_value_is_compared_with_what_it_was() -> None:
    """Before anyone reads it (Rule 2)."""
    x = leaf(3)
    made = x.sin()
    cell = SharedValue()
    cell.proof = proof_of(made)
    assert torch.equal(rebuilt(made.grad_fn, cell, Unseen), made)
    x.data.add_(1)
    with pytest.raises(Unseen):
        rebuilt(made.grad_fn, cell, Unseen)


def test_leaf_is_read_as_it_was_where_a_copy_is_kept() -> None:
    """The bias of a product, which its node did not save."""
    bias, x, w = leaf(3), leaf(3, 3), leaf(3, 3)
    made = torch.addmm(bias, x, w)
    cell = SharedValue()
    with torch.no_grad():
        assert torch.equal(rebuilt(made.grad_fn, cell, Unseen), made)
        cell.leaf = bias.detach().clone()
        bias.data.add_(1)
        assert torch.equal(rebuilt(made.grad_fn, cell, Unseen), made)


@pytest.mark.parametrize("views", [0, 1, 2])
def test_kept_operand_is_read_through_as_many_views(views: int) -> None:
    """What lies further on is not made again."""
    x, base = leaf(3, 3), leaf(3, 3).exp()
    chain = [base, base.t(), base.t()[1]]
    made = chain[views] + x
    source = Source(base.detach(), lambda held: held)
    cell = SharedValue()
    cell.through, cell.held = True, {0: (views, weakref.ref(source))}
    with torch.no_grad():
        assert torch.equal(rebuilt(made.grad_fn, cell, Unseen), made)


def test_leaf_without_elements_has_all_its_data() -> None:
    """It has no bytes, and none are missing."""
    made = leaf(0, 3) + leaf(0, 3)
    cell = SharedValue()
    cell.through, cell.held = True, {}
    with torch.no_grad():
        assert rebuilt(made.grad_fn, cell, Unseen).shape == (0, 3)


def test_hooks_are_restored_after_a_replay_that_fails_too(monkeypatch) -> None:
    """Reading what the node saved may have taken them away."""
    nodes: list[Any] = []
    monkeypatch.setattr(_rebuilt, "FORGETS_HOOKS", True)
    monkeypatch.setattr(_rebuilt, "restore_hooks", nodes.append)
    x = leaf(3)
    made = x.sin()
    cell = SharedValue()
    rebuilt(made.grad_fn, cell, Unseen)
    cell.proof = proof_of(made.cos())
    with pytest.raises(Unseen):
        rebuilt(made.grad_fn, cell, Unseen)
    assert nodes == [made.grad_fn] * 2
