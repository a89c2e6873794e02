"""A model fitted to the least it can keep: what else a step may do, and what it may not read."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from torchparts_conformance import requirement

from .test_fitted import Block, seeded


class Rising(Block):
    """Its largest values so far, of which the places are saved."""

    def forward(self, x, mask=None):
        """Rows in, rows out."""
        return super().forward(x, mask).cummax(-1)[0]


class Slope(Block):
    """Adds its own gradient by its input."""

    def forward(self, x, mask=None):
        """Rows in, rows out."""
        y = super().forward(x, mask)
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + 1e-3 * slope


class Nested(Block):
    """Has a checkpoint inside."""

    def forward(self, x, mask=None):
        """Rows in, rows out."""
        return checkpoint(super().forward, x, mask, use_reentrant=False).cummax(-1)[0]


def backward_twice(loss, parameters):
    """From one graph."""
    loss.backward(retain_graph=True)
    loss.backward()


def penalty(loss, parameters):
    """Differentiate the size of the gradients."""
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    sum(each.square().sum() for each in gradients).backward()


def halves(loss, parameters):
    """Half of the gradients, then the others."""
    some, others = parameters[::2], parameters[1::2]
    found = (
        *torch.autograd.grad(loss, some, retain_graph=True),
        *torch.autograd.grad(loss, others),
    )
    for parameter, gradient in zip([*some, *others], found, strict=True):
        parameter.grad = gradient


def backward(loss, parameters):
    """As training does."""
    loss.backward()


STEPS = {
    "a second backward": ((Block, Rising), backward_twice, False),
    "a gradient of gradients": ((Block, Rising), penalty, False),
    "half of the gradients": ((Block, Rising), halves, False),
    "a gradient inside": ((Slope,), backward, False),
    "a checkpoint inside": ((Nested,), backward, False),
    "hooks around": ((Block, Rising), backward, True),
}


def least(part, kind, device):
    """A model of blocks of a kind, the same fitted to the least it can keep, and a batch."""
    model, batch = seeded(device, rows=64)
    torch.manual_seed(0)
    with torch.device(device):
        model.blocks = nn.ModuleList(kind(32) for _ in range(3))
    model.requires_grad_(True)
    plain = copy.deepcopy(model)
    batch["x"].requires_grad_()
    refused = part.fit_(model, batch, 1000, of="kept")
    assert not refused
    assert part.fit_(model, batch, refused.smallest_bytes, of="kept")
    return plain, model, batch


def doubled(value):
    """Give what hooks are to hold."""
    return value.clone()


@requirement(
    "SP-217",
    level="MUST",
    text=(
        "A model that `fit_` has changed to keep the least MUST have the gradients of no "
        "checkpointing, bitwise, in a second backward of one graph, in a gradient of gradients,"
        " where half of the gradients are asked for first, where a block takes a gradient "
        "itself or has a checkpoint inside, and under saved-tensor hooks; an input or a "
        "parameter of a block that was written to after its forward MUST NOT be read as it then"
        " is."
    ),
    rationale=(
        "a second forward is made for one backward of all gradients, and training does more "
        "than that"
    ),
    since="0.1.0",
    profile="budget",
)
@pytest.mark.parametrize("name", STEPS)
def test_whatever_a_step_does_has_plain_gradients(part, device, name):
    """Bitwise, dropout included, in two steps in a row."""
    kinds, backward, hooked = STEPS[name]

    def step(model):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        if hooked:
            with saved_tensors_hooks(doubled, doubled):
                loss = model(**batch)["loss"]
        else:
            loss = model(**batch)["loss"]
        backward(loss, list(model.parameters()))
        return [parameter.grad for parameter in model.parameters()]

    for kind in kinds:
        plain, fitted, batch = least(part, kind, device)
        for _ in range(2):
            assert all(map(torch.equal, step(plain), step(fitted)))


@requirement("SP-217")
@pytest.mark.parametrize("what", ["input", "weight"])
@pytest.mark.parametrize("kind", [Block, Rising])
def test_what_was_written_to_is_not_read(part, device, kind, what):
    """Backward raises, or does not need it: its gradients are those of before the write."""
    plain, fitted, batch = least(part, kind, device)

    def step(model, writes):
        given = []
        model.blocks[1].register_forward_pre_hook(lambda module, args: given.append(args[0]))
        torch.manual_seed(1)
        loss = F.mse_loss(model(**batch)["out"], batch["target"])
        if writes:
            with torch.no_grad():
                (given[0] if what == "input" else model.blocks[1].up.weight).mul_(2)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = step(plain, False)
    try:
        found = step(fitted, True)
    except Exception:
        return
    assert all(map(torch.equal, expected, found))
