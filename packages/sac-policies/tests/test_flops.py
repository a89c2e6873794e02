"""Floating point operations of a call, from torch's formulas and those it lacks."""

from __future__ import annotations

import torch

from sac_policies import report, save_ops


def test_attention_on_cpu_has_a_flop_count():
    """torch's registry lacks the CPU kernel: 2 * heads * s * t * (e + v)."""
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    rows = report(
        torch.nn.functional.scaled_dot_product_attention, q, q, q, policy=save_ops("@attention")
    ).kept
    assert [row.flops for row in rows] == [2 * 2 * 4 * 4 * (8 + 8)]
