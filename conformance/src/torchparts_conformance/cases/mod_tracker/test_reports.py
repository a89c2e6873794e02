"""Reports: sums, phases, and operators that are counted."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement


def _gradients(measure, kind, device):
    x = torch.linspace(-8, 8, 2048, device=device).requires_grad_()
    with measure():
        kind()(x).square().sum().backward()
    return x.grad


@requirement(
    "MT-404",
    "Counting operations MUST leave gradients bit-identical, also for operators that have both a "
    "decomposition and a kernel.",
    rationale="reproduced: counting decomposed the backward of SiLU",
    profile="reports",
)
@pytest.mark.parametrize("kind", [nn.SiLU, nn.Mish])
def test_counting_changes_no_bit(part, device, kind):
    """Operators with a kernel run that kernel."""
    counted = _gradients(part.profile_flops, kind, device)
    assert torch.equal(counted, _gradients(nullcontext, kind, device))


@requirement(
    "MT-407",
    "FLOPs of grouped products, as in a mixture of experts, MUST be those of the products, on "
    "every device.",
    rationale="torch's counter has no formula for them, so experts count as zero",
    profile="reports",
)
def test_flops_of_products_of_groups(part, device):
    """Two experts with eight rows in all: forward and both gradients; rows before torch 2.10."""
    x, w = (torch.ones(*s, device=device, requires_grad=True) for s in ((8, 16), (2, 16, 32)))
    product = getattr(nn.functional, "grouped_mm", None)
    with part.profile_flops() as report:
        if product is None:
            made = torch.cat([x[:3] @ w[0], x[3:] @ w[1]])
        else:
            ends = torch.tensor([3, 8], dtype=torch.int32, device=device)
            made = product(x.bfloat16(), w.bfloat16(), offs=ends)
        made.square().sum().backward()
    assert report.total == 3 * (2 * 8 * 16 * 32)
