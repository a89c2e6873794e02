"""Recipes take a view again from what its node knows: its values and its strides."""

from __future__ import annotations

import torch

from sac_policies.engines.recipe._views import VIEWS


def test_views_are_nodes_of_this_torch() -> None:
    """Every view listed exists, so that none is a misspelling."""
    x = torch.ones(2, 3, 4, requires_grad=True)
    made = [
        x.expand(2, 3, 4), x.permute(2, 0, 1), x.view(6, 4), x[0], x[:, 1:], x.split(1)[0],
        x.split_with_sizes([1, 1])[0], x[0].t(), x.transpose(0, 1), x.unbind()[0], x.unsqueeze(0),
        x.diagonal(), x[:1].squeeze(0), x.as_strided((2,), (1,)), torch.ops.aten.alias(x),
        torch.ops.aten._unsafe_view(x, (6, 4)), x.unsafe_split(1)[0], x[:1].squeeze(),
        x[:1].squeeze((0,)), torch.ops.aten._reshape_alias(x, (6, 4), (4, 1)),
    ]  # fmt: skip
    assert {type(each.grad_fn).__name__ for each in made} == VIEWS
