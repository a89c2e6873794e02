"""Reports: sums, phases, and operators that are counted."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from torchparts_conformance import requirement
from torchparts_conformance.cases.mod_tracker._models import Checkpointed, leaf, linear, step


@requirement(
    "MT-301",
    "The FLOPs of all modules themselves and of the outside MUST add up to the total, and the "
    "total MUST equal that of torch's counter.",
    rationale="a report that does not add up has a wrong row",
    profile="reports",
)
def test_flops_add_up(part, device):
    """Rows, total and torch's counter agree."""
    model, x = Checkpointed(device, use_reentrant=False), leaf(device)
    with FlopCounterMode(display=False) as counter:
        step(model, x)
    with part.profile_flops() as report:
        step(model, x)
        x @ x.T
    assert report.outside.total == 2 * 2 * 2 * 4
    assert report.total == report.sum("self_total") == counter.get_total_flops() + 32


@requirement(
    "MT-302",
    "FLOPs MUST be divided exactly into forward, recompute and backward, with both kinds of "
    "checkpointing.",
    rationale="a report that does not add up has a wrong row",
    profile="reports",
)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_flops_are_split_by_phase(part, device, use_reentrant):
    """A product costs 64: one in forward, at most one in recompute, two in backward."""
    with part.profile_flops() as report:
        step(Checkpointed(device, use_reentrant=use_reentrant), leaf(device))
    rows = {name: report[f"Checkpointed.{name}"] for name in ("m.a", "m.b", "out")}
    split = {name: (row.forward, row.recompute, row.backward) for name, row in rows.items()}
    again = 64 if use_reentrant else 0
    assert split == {"m.a": (64, 64, 128), "m.b": (64, again, 128), "out": (64, 0, 128)}


@requirement(
    "MT-412",
    "Operators that a checkpoint recomputes between the modules in its region MUST count as "
    "recompute of the module that ran them.",
    rationale=(
        "reproduced on a published UNet: recomputed attention counted as backward of another module"
    ),
    profile="reports",
)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_flops_between_modules_of_a_checkpoint(part, device, use_reentrant):
    """A product of the region itself, between two layers."""

    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.w = linear(device), linear(device), linear(device).weight

        def region(self, x):
            return self.b((self.a(x).tanh() @ self.w).tanh())

        def forward(self, x):
            return checkpoint(self.region, x, use_reentrant=use_reentrant)

    with part.profile_flops() as report:
        step(Between(), leaf(device))
    split = {name: (row.self_recompute, row.self_backward) for name, row in report.rows.items()}
    again = 64 if use_reentrant else 0
    assert split == {"Between": (64, 128), "Between.a": (64, 128), "Between.b": (again, 128)}


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


@requirement(
    "MT-408",
    "FLOPs of attention MUST be those of its products, for every attention kernel of torch, also "
    "with shared key heads.",
    rationale=(
        "torch's counter has no formula for the CPU kernel, so attention counts as zero there"
    ),
    profile="reports",
)
@pytest.mark.parametrize("heads", [4, 2], ids=["own keys", "shared keys"])
def test_flops_of_attention(part, device, heads):
    """For each kernel: two products in forward, and four in backward, or five if it recomputes."""

    class Attention(nn.Module):
        def forward(self, q, k, v):
            return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=heads < 4)

    def given(count):
        x = torch.ones(2, count, 16, 32, device=device, dtype=torch.bfloat16)
        return x.requires_grad_()

    inputs, counted = (given(4), given(heads), given(heads)), []
    for kernel in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel(kernel):
            try:
                Attention()(*inputs)
            except RuntimeError:
                continue  # not available on this device
            with part.profile_flops() as report:
                Attention()(*inputs).sum().backward()
        counted.append((report["Attention"].forward, report["Attention"].backward))
    product = 2 * (2 * 4) * 16 * 16 * 32
    assert counted
    assert {forward for forward, _ in counted} == {2 * product}
    assert {backward for _, backward in counted} <= {4 * product, 5 * product}
