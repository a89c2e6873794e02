"""A value is rebuilt once for all its readers, from leaves, from what is kept, or by replays."""

from __future__ import annotations

import pytest
import torch

from sac_policies import RecomputeError, save_ops

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
