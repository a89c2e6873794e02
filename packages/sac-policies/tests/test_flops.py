"""Floating point operations of a call, from torch's formulas and those it lacks."""

from __future__ import annotations

import torch

from sac_policies import report, save_ops
from sac_policies.policies._flops import flops_of

aten = torch.ops.aten


def test_attention_on_cpu_has_a_flop_count():
    """torch's registry lacks the CPU kernel: 2 * heads * s * t * (e + v)."""
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    rows = report(
        torch.nn.functional.scaled_dot_product_attention, q, q, q, policy=save_ops("@attention")
    ).kept
    assert [row.flops for row in rows] == [2 * 2 * 4 * 4 * (8 + 8)]


def test_product_is_two_for_each_pair():
    """One multiplication and one addition."""
    a, b = torch.ones(2, 3), torch.ones(3, 5)
    assert flops_of(aten.mm.default, (a, b), {}, a @ b) == 2 * 2 * 3 * 5


def test_operator_without_a_formula_counts_nothing():
    """As those that work on one element after the other."""
    a = torch.ones(4)
    assert flops_of(aten.sin.default, (a,), {}, a) == 0


def test_attention_on_cpu_counts_keys_and_values_of_other_sizes():
    """Scores are s by t by e, outputs s by t by v, for each head of the batch."""
    query, key, value = torch.ones(3, 2, 5, 8), torch.ones(3, 2, 7, 8), torch.ones(3, 2, 7, 4)
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert flops_of(op, (query, key, value, 0.0, True), {}, None) == 3 * 2 * 2 * 5 * 7 * (8 + 4)


def test_keyword_arguments_reach_the_formula():
    """A convolution's stride makes its output, and with it the count, smaller."""
    x, w = torch.ones(1, 2, 8, 8), torch.ones(3, 2, 3, 3)
    out = torch.conv2d(x, w, stride=2)
    args = (x, w, None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1)
    assert flops_of(aten.convolution.default, args, {}, out) == 2 * out.numel() * 2 * 9
    kwargs = {"transposed": False, "output_padding": [0, 0], "groups": 1}
    assert flops_of(aten.convolution.default, args[:6], kwargs, out) == 2 * out.numel() * 2 * 9


def test_operator_that_has_no_overloads_counts_nothing():
    """Higher-order operators are their own packet."""
    assert flops_of(torch.ops.higher_order.cond, (), {}, None) == 0
