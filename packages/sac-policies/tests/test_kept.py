"""Contexts engine: what is kept stays as it was when it was kept, here or in hooks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sac_policies import MutationError, offload, save_ops

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


def test_offload_is_honoured_in_eager(counting):
    """An offloaded value is brought back, not computed again."""
    a, b = ab()
    kept = contexts(lambda p, q: (p @ q).sin().cos(), a, b, policy=offload("aten.mm"))
    with counting() as counts:
        kept.sum().backward()
    assert counts["aten.mm.default"] == 2


def test_saved_values_pass_through_the_users_hooks():
    """Saved-tensor hooks around the region see its saved values too."""
    a, b = ab()
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held):
        out = contexts(lambda p, q: (p @ q[:, :3]).sin(), a, b, policy=PRODUCTS)
    assert (8, 3) in packed
    out.sum().backward()
