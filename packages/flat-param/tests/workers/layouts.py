"""Every mixture of frozen, tied and nested units, beside the plain module, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from _harness import options_of
from _whole import whole_grads
from torch import Tensor, nn

from flat_param import fully_shard

BITS = (False, True)


def make(frozen: tuple[bool, ...], *, tied: bool) -> tuple[nn.Module, list[nn.Module]]:
    """Three layers, the last two in a block, which may share a weight, and a frozen norm."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6) for _ in range(3)]
    if tied:
        layers[2].weight = layers[1].weight
    for layer, still in zip(layers, frozen, strict=True):
        layer.requires_grad_(not still)
    norm = nn.LayerNorm(6).requires_grad_(False)
    block = nn.Sequential(layers[1], nn.Tanh(), layers[2])
    return nn.Sequential(layers[0], norm, block), [*layers, block]


def layouts() -> Iterator[tuple[tuple[bool, ...], tuple[bool, ...], bool, bool]]:
    """Which layers are frozen; which are units, and the block; tied; whether inputs have grads."""
    for frozen, units, tied, leads_on in product(
        product(BITS, repeat=3), product(BITS, repeat=4), BITS, BITS
    ):
        if not all(frozen) and not (tied and (units[1] or units[2])):
            yield frozen, units, tied, leads_on


def shares(*, leads_on: bool) -> list[Tensor]:
    """The inputs of two ranks."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 6, generator=generator).requires_grad_(leads_on) for _ in "ab"]


def mean_grads(model: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Of the plain module, the sum in the order of ranks."""
    found: dict[str, Tensor] = {}
    for each in inputs:
        model.zero_grad()
        model(each).square().sum().backward()
        for name, param in model.named_parameters():
            if param.grad is not None:
                found[name] = found[name] + param.grad if name in found else param.grad
    return {name: grad / len(inputs) for name, grad in found.items()}


def run(rank: int, world: int, way: str) -> dict[str, Any]:
    """How many layouts were tried, and what was wrong with which."""
    wrong, tried = [], 0
    for layout in layouts():
        frozen, units, tied, leads_on = layout
        inputs = shares(leads_on=leads_on)
        expected = mean_grads(make(frozen, tied=tied)[0], inputs)
        model, parts = make(frozen, tied=tied)
        for part, is_unit in zip(parts, units, strict=True):
            if is_unit:
                fully_shard(part, **options_of(way))
        fully_shard(model, **options_of(way))
        tried += 1
        try:
            model(inputs[rank]).square().sum().backward()
        except RuntimeError as error:
            wrong.append([layout, str(error)])
            continue
        grads = whole_grads(model)
        found = {n: grads[n] for n, param in model.named_parameters() if param.grad is not None}
        if list(found) != list(expected) or not all(
            map(torch.equal, found.values(), expected.values())
        ):
            wrong.append([layout, "other gradients"])
    return {"tried": tried, "wrong": wrong}
