"""FLOPs of a call, from torch's formulas and those that torch lacks."""

from __future__ import annotations

import pytest
import torch
from torch.utils import flop_counter

from sac_policies import profile
from sac_policies.policies._flops import flops_of

aten = torch.ops.aten


def test_operator_without_a_formula_counts_nothing():
    """Elementwise operators count zero."""
    a = torch.ones(4)
    assert flops_of(aten.sin.default, (a,), {}, a) == 0


def test_attention_on_cpu_counts_keys_and_values_of_other_sizes():
    """Scores are (s, t) with width e, outputs (s, t) with width v, for each head of the batch."""
    query, key, value = torch.ones(3, 2, 5, 8), torch.ones(3, 2, 7, 8), torch.ones(3, 2, 7, 4)
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert flops_of(op, (query, key, value, 0.0, True), {}, None) == 3 * 2 * 2 * 5 * 7 * (8 + 4)


def test_keyword_arguments_reach_the_formula():
    """A convolution's stride reduces its output, and therefore the count."""
    x, w = torch.ones(1, 2, 8, 8), torch.ones(3, 2, 3, 3)
    out = torch.conv2d(x, w, stride=2)
    args = (x, w, None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1)
    assert flops_of(aten.convolution.default, args, {}, out) == 2 * out.numel() * 2 * 9
    kwargs = {"transposed": False, "output_padding": [0, 0], "groups": 1}
    assert flops_of(aten.convolution.default, args[:6], kwargs, out) == 2 * out.numel() * 2 * 9


def test_operator_that_has_no_overloads_counts_nothing():
    """Higher-order operators are their own packet."""
    assert flops_of(torch.ops.higher_order.cond, (), {}, None) == 0


KERNELS = {
    "flash_attention": (),
    "efficient_attention": (None, True),
    "cudnn_attention": (None, True),
    "fused_attention_overrideable": (),
}


@pytest.mark.parametrize("heads", [4, 2], ids=["own keys", "shared keys"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_of_a_device_is_counted_without_one(kernel, heads):
    """For each kernel; formulas of torch before 2.13 raise where heads share keys."""

    def given(count):
        made = torch.ones(2, count, 16, 32, device="meta", dtype=torch.bfloat16)
        return made.requires_grad_()

    op = getattr(aten, f"_scaled_dot_product_{kernel}")
    trace = profile(
        lambda *given: op(*given, *KERNELS[kernel])[0],
        *(given(4), given(heads), given(heads)),
        unit="flops",
    )
    assert [each.cost for each in trace.ops] == [2 * 2 * 2 * 4 * 16 * 16 * 32]


def test_backward_of_attention_counts_five_products():
    """Recomputed scores, and two matmuls for each matmul of the forward."""
    query, key, value = torch.ones(3, 4, 5, 8), torch.ones(3, 2, 7, 8), torch.ones(3, 2, 7, 4)
    grad, op = torch.ones(3, 4, 5, 4), aten._scaled_dot_product_flash_attention_backward.default
    counted = flops_of(op, (grad, query, key, value, None), {}, None)
    assert counted == 2 * 3 * 4 * 5 * 7 * (3 * 8 + 2 * 4)


def test_formula_that_raises_is_none(monkeypatch):
    """An error in a user's formula does not stop the profile."""

    def formula(*args, **kwargs):
        raise AssertionError("of two dimensions only")

    monkeypatch.setitem(flop_counter.flop_registry, aten.sin, formula)
    (op,) = profile(torch.sin, torch.ones(4, requires_grad=True), unit="flops").ops
    assert op.cost == 4
