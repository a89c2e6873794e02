"""Facts about operators, from their schemas."""

from __future__ import annotations

import pytest
import torch

from sac_policies import PolicyError, save_ops
from sac_policies.policies import _matching
from sac_policies.policies._operators import facts_of

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "fact", "value"),
    [
        (aten.relu_.default, "writes", ((0, "self"),)),
        (aten.add.out, "writes", ((None, "out"),)),
        (aten.mm.default, "writes", ()),
        (aten.bernoulli_.float, "random", True),
        (aten.mm.default, "random", False),
        (aten.view.default, "is_view", True),
        (aten.relu_.default, "is_view", False),
        (aten.detach.default, "bookkeeping", True),
        (aten.sym_size.int, "bookkeeping", True),
        (aten.mm.default, "bookkeeping", False),
    ],
)
def test_fact(op, fact, value):
    """One fact of one operator."""
    assert getattr(facts_of(op), fact) == value


def test_attention_draws_only_with_dropout():
    """dropout_p is the operator's fourth argument."""
    facts = facts_of(aten._scaled_dot_product_flash_attention_for_cpu.default)
    assert facts.random
    assert not facts.draws((1, 2, 3))
    assert not facts.draws((1, 2, 3, 0.0))
    assert facts.draws((1, 2, 3, 0.1))


def test_written_tensors_are_found():
    """By position, by keyword, and inside lists."""
    x, y = torch.ones(2), torch.ones(2)
    assert facts_of(aten.relu_.default).written((x,), {})[0] is x
    assert facts_of(aten.add.out).written((x, x), {"out": y})[0] is y
    assert len(facts_of(aten._foreach_add_.Scalar).written(([x, y], 1), {})) == 2


def test_registered_operators_are_listed_only_for_names_that_are_none(monkeypatch):
    """Policies are made often, for example in each step; listing all operators of torch is slow."""
    listed = []

    def listing():
        listed.append(True)
        return ["aten::mm"]

    monkeypatch.setattr(_matching, "registered_operators", listing)
    save_ops("aten.mm", "aten.add.Tensor", "aten::sin", "aten.s*", "@matmuls")
    assert not listed
    with pytest.raises(PolicyError, match=r"Did you mean 'aten\.mm'"):
        save_ops("aten.mmm")
    assert listed
