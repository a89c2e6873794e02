"""A region whose forward does something else than those before it: another branch, more layers."""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchparts_conformance import requirement

from .test_budget_plans import left

WIDTH, ROWS, MOST = 64, 64, 6
FORWARDS = 4  # alike, before another one


class Changing(nn.Module):
    """Norms by hand, turned halves, products and gates: so many layers, by one of two branches."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(
            torch.linspace(-1, 1, WIDTH * WIDTH).add(each).sin().view(WIDTH, WIDTH) / 8
            for each in range(MOST)
        )
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.layers, self.branch = MOST - 2, False

    def forward(self, x):
        """(rows, width) in and out."""
        for number, weight in enumerate(self.weights[: self.layers]):
            y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
            left, right = (y @ weight).chunk(2, -1)
            z = torch.cat((-right, left), -1)
            if self.branch and number == self.layers // 2:
                x = x + F.layer_norm(z, (WIDTH,)).tanh() * y.exp()
            else:
                x = x + F.silu(z) * y
        return x.sin()


def _changing(device, **settings):
    model = Changing().to(device)
    vars(model).update(settings)
    return model


def _rest(device):
    """Wait until a device's thread has let go of the backward that it ran: it may do so later."""
    if device != "cpu":
        accelerator, before = torch.get_device_module(device), -1
        accelerator.synchronize()
        while before != (before := accelerator.memory_allocated()):
            time.sleep(0.05)


def _kept(part, model, x, policy, device):
    """Bytes that a forward keeps besides its output, and its gradients."""
    outs = []

    def forward():
        outs.append(part.checkpoint(model, x, policy=policy, engine="recipe"))
        return outs

    gc.collect()
    _rest(device)
    kept = left(forward, device) - outs[0].nbytes
    return kept, _gradients(outs.pop(), model, x)


def _gradients(out, model, x):
    return torch.autograd.grad(out.square().sum(), [x, model.scale, *model.weights[: model.layers]])


@requirement(
    "SP-210",
    level="MUST",
    text=(
        "A forward that does something else than those before it, by another branch or with "
        "another number of layers, MUST keep no more than 1.05 times what the first forward of "
        "a function keeps that does the same, and its gradients MUST be those of no "
        "checkpointing, bitwise."
    ),
    rationale=(
        "an engine that decides once for forwards that are alike kept up to four times as much "
        "from where one of them was not"
    ),
    since="0.1.0",
    profile="recipe",
)
@pytest.mark.parametrize("keeps", ["nothing", "products"])
@pytest.mark.parametrize(
    "settings",
    [{"branch": True}, {"layers": MOST}, {"layers": 3, "branch": True}],
    ids=["branch", "more", "fewer, and a branch"],
)
def test_forward_that_does_something_else_keeps_no_more(part, device, settings, keeps):
    """After a few that are alike, and once more; a module that never did anything else keeps so
    much in its first forward."""
    policy = part.recompute_all() if keeps == "nothing" else part.save_ops("aten.mm")
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
    other, used = (_changing(device, **settings) for _ in "ab")
    # First uses are not the subject.
    part.checkpoint(used, x, policy=policy, engine="recipe").sum().backward()
    most, _ = _kept(part, other, x, policy, device)
    expected = _gradients(other(x), other, x)
    model = _changing(device)
    alike = vars(model).copy()
    for _ in range(2):
        vars(model).update(alike)
        for _ in range(FORWARDS):
            part.checkpoint(model, x, policy=policy, engine="recipe").sum().backward()
        vars(model).update(settings)
        kept, found = _kept(part, model, x, policy, device)
        assert kept <= 1.05 * most
        assert all(map(torch.equal, found, expected))
