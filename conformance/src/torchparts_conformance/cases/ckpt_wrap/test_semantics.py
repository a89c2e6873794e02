"""Recomputation and offload: cases that torch 2.13 fails."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement


class Scaled(nn.Module):
    """Positional, keyword and nested tensors with dropout; counts its forwards."""

    runs = 0  # in the class: a module's state may be put back

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, scale=None, nested=None):
        """Combine all tensors."""
        Scaled.runs += 1
        y = torch.tanh(self.linear(x))
        if scale is not None:
            y = y * torch.sin(scale)
        if nested is not None:
            y = y * torch.sin(nested["t"][0])
        return nn.functional.dropout(y, 0.5)


def leaf(device, *shape):
    """A random leaf that requires grad."""
    return torch.randn(*shape, device=device, requires_grad=True)


@requirement(
    "CW-036",
    "If an input is changed in place between forward and backward, backward MUST raise, for "
    "positional, keyword and nested inputs.",
    rationale="reproduced on torch 2.13: keyword and nested inputs give wrong gradients silently",
)
def test_an_input_changed_in_place_raises(part, device):
    """Positional, keyword and nested, under both implementations."""
    places = ("positional", "keyword", "nested")
    for impl, place in itertools.product(part.CheckpointImpl, places):
        module = part.checkpoint_wrapper(Scaled().to(device), impl)
        x, other = leaf(device, 3, 6), torch.randn(3, 6, device=device)
        if place == "positional":
            loss = module(x, other).sum()
        elif place == "keyword":
            loss = module(x, scale=other).sum()
        else:
            loss = module(x, nested={"t": [other]}).sum()
        other.add_(1)
        with pytest.raises(RuntimeError):
            loss.backward()


@requirement(
    "CW-037",
    "Saved-tensor hooks around a wrapper MUST see every input tensor: positional, keyword and "
    "nested.",
    rationale="reproduced on torch 2.13: the hooks see only positional ones",
)
def test_outer_hooks_see_every_input(part, device):
    """Hooks see positional, keyword and nested tensors."""
    module = part.checkpoint_wrapper(Scaled().to(device))
    given = [torch.randn(3, 6, device=device) for _ in range(3)]
    packed = set()

    def pack(tensor):
        packed.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(given[0], scale=given[1], nested={"t": [given[2]]})
    assert {tensor.data_ptr() for tensor in given} <= packed


@requirement(
    "CW-038",
    "Recomputation MUST use the random numbers of forward also if all tensors are passed by "
    "keyword.",
    rationale=(
        "pytorch#190758 for compiled code; torch 2.13 saves the random state only of devices of "
        "positional tensors"
    ),
)
def test_dropout_is_replayed_for_keyword_tensors(part, device):
    """No tensor is passed by position."""
    plain = Scaled().to(device)
    wrapped = part.checkpoint_wrapper(copy.deepcopy(plain))
    x = leaf(device, 8, 6)
    grads = []
    for module in (plain, wrapped):
        torch.manual_seed(0)
        x.grad = None
        module(x=x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@requirement(
    "CW-039",
    "Checkpoint around offload, and offload around checkpoint, MUST both run forward twice and "
    "give the plain module's gradients.",
    rationale=(
        "reproduced on torch 2.13: checkpoint around offload does not recompute; pytorch#84907"
    ),
)
def test_checkpoint_and_offload_compose_both_ways(part, device):
    """Two forwards, and the plain module's gradients."""
    plain = Scaled().to(device)
    x = leaf(device, 4, 6)
    wraps = (
        lambda m: m,
        lambda m: part.checkpoint_wrapper(part.offload_wrapper(m)),
        lambda m: part.offload_wrapper(part.checkpoint_wrapper(m)),
    )
    grads = []
    for wrap in wraps:
        inner = copy.deepcopy(plain)
        Scaled.runs = 0
        torch.manual_seed(0)
        x.grad = None
        wrap(inner)(x).sum().backward()
        grads.append(x.grad)
        assert Scaled.runs == (1 if wrap is wraps[0] else 2)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


@requirement(
    "CW-046",
    "`torch.func.grad` through a wrapped module SHOULD work.",
    rationale="reproduced on torch 2.13: RuntimeError: saved tensor hooks are not supported",
)
def test_func_grad(part, device):
    """torch.func.grad gives autograd's gradient."""
    wrapped = part.checkpoint_wrapper(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(device))
    x = leaf(device, 2, 3)
    wrapped(x).sum().backward()
    got = torch.func.grad(lambda t: wrapped(t).sum())(x.detach())
    assert torch.equal(got, x.grad)


@requirement(
    "CW-047",
    "Offload SHOULD NOT copy a CPU tensor.",
    rationale=(
        "reproduced on torch 2.13: copies it, to pinned memory if that is available; pytorch#86097"
    ),
)
def test_offload_copies_nothing_on_the_cpu(part):
    """Counts calls of the copying methods of tensors in a forward and backward."""
    module = part.offload_wrapper(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    x = torch.randn(8, 64, requires_grad=True)
    copies = []
    original = torch.Tensor.copy_

    def counted(self, *args, **kwargs):
        copies.append(self.shape)
        return original(self, *args, **kwargs)

    torch.Tensor.copy_ = counted
    try:
        module(x).sum().backward()
    finally:
        torch.Tensor.copy_ = original
    assert x.grad is not None
    assert not copies
