"""Contexts engine: what is done at one operator, by its facts and the policy; no view is kept."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from sac_policies import (
    checkpoint,
    offload,
    recompute_all,
    save_all,
    save_by_bytes,
    save_named,
    save_ops,
)

from ._contexts import ab, contexts


@pytest.mark.parametrize("policy", [recompute_all(), save_ops("flex_attention")])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_higher_order_operator_runs_in_a_region(policy):
    """In eager code too; here its inputs need no gradient, which it has on no CPU."""
    q, w = torch.linspace(-1, 1, 256).reshape(1, 1, 16, 16), torch.ones(16, requires_grad=True)

    def body(t):
        return (flex_attention(q, q, q) * t).sin()

    plain = torch.autograd.grad(body(w).sum(), w)
    kept = torch.autograd.grad(contexts(body, w, policy=policy).sum(), w)
    assert torch.equal(plain[0], kept[0])


@pytest.mark.parametrize(
    "policy", [recompute_all(), save_ops("aten.mm"), save_all()], ids=["none", "mm", "all"]
)
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.unsqueeze_(0),
        lambda t: t.t_(),
        lambda t: t.transpose_(0, 1),
        lambda t: t.unsqueeze_(1).squeeze_(1),
        lambda t: t.as_strided_((3, 4), (1, 3)),
    ],
    ids=["unsqueeze", "t", "transpose", "squeeze", "as_strided"],
)
def test_operators_that_change_a_shape_in_place(policy, change):
    """What is kept of the value before them is kept in its own shape."""
    w = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    x = torch.linspace(0, 1, 12).view(4, 3).requires_grad_()

    def function(t):
        made = t @ w @ w.t()
        return change(made).sin()

    plain = torch.autograd.grad(function(x).sum(), [x, w])
    out = checkpoint(function, x, policy=policy, engine="contexts")
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), [x, w]), plain))


def _through_view(p, q):
    y = p @ q
    y.view(-1).mul_(2)
    return y.sin()


def _under_view(p, q):
    y = p @ q
    row = y[1]
    y.mul_(2)
    return row.sin()


def _into_row(p, q):
    y = p @ q
    y[0] = 3.0
    return y.sin() * y.t()


VIEWS = ("aten.view", "aten.select.int", "aten.t")


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("body", [_through_view, _under_view, _into_row])
@pytest.mark.parametrize(
    "policy",
    [
        save_all(),
        save_ops(*VIEWS),
        save_ops("aten.mm", *VIEWS),
        offload(save_all()),
        save_by_bytes(),
        save_by_bytes() | save_named("none", missing_ok=True),
    ],
    ids=["all", "views", "both", "offload", "asked", "asked with names"],
)
def test_views_stay_views_of_what_is_written_to(body, policy, gradients, equal):
    """A saved view and its saved base see each other's changes in the recomputation too."""
    a, b = ab()
    found = gradients(lambda p, q: contexts(body, p, q, policy=policy), a, b)
    assert equal(found, gradients(body, a, b))
