"""Contexts engine: values that are written to, views of them, and statistics of a batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sac_policies import MutationError, offload, save_all, save_by_bytes, save_named, save_ops

from ._contexts import PRODUCTS, ab, contexts


def test_in_place_change_of_a_saved_value_inside_the_region(gradients, equal):
    """A saved value is kept as it was when a later operator writes over it."""
    a, b = ab()

    def body(p, q):
        return torch.selu_(p @ q).sin()

    plain = gradients(body, a, b)
    assert equal(gradients(lambda p, q: contexts(body, p, q, policy=PRODUCTS), a, b), plain)


def test_saved_in_place_operator_writes_its_value_back(gradients, equal):
    """A saved in-place operator leaves its value in the tensor it wrote to."""
    a, b = ab()

    def body(p, q):
        h = p @ q
        torch.selu_(h)
        return h.sin()

    plain = gradients(body, a, b)
    policy = save_ops("aten.elu_")
    assert equal(gradients(lambda p, q: contexts(body, p, q, policy=policy), a, b), plain)


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


def test_change_of_a_saved_value_after_the_region_is_an_error():
    """A saved output that the caller overwrites is reported with operator and line."""
    a, b = ab()
    held = []

    def body(p, q):
        h = p @ q
        held.append(h.detach())
        return h.sin()

    out = contexts(body, a, b, policy=PRODUCTS)
    held[0].zero_()
    with pytest.raises(
        MutationError, match=r"output of aten.mm.default .*test_kept.py:\d+ in body"
    ):
        out.sum().backward()


def test_batch_norm_updates_its_statistics_once_when_saved(equal):
    """A saved batch norm does not count the batch a second time in backward."""
    torch.manual_seed(0)
    plain, kept = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    a, _ = ab()
    plain(a.sin()).square().sum().backward()
    policy = save_ops("aten.native_batch_norm")
    contexts(lambda p: kept(p.sin()), a, policy=policy).square().sum().backward()
    assert torch.equal(plain.running_mean, kept.running_mean)
