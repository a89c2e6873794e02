"""`torch.amp.GradScaler` on pieces: an overflow on one rank is one on all."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from _harness import WAYS, distance, options_of, raises, whole_state
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from flat_param import StateError, fully_shard


class Scales(nn.Module):
    """Two vectors: a large factor gives an infinite gradient to the first alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, factors: Tensor | None) -> Tensor:
        scaled = 0 if factors is None else self.weight * factors
        return (scaled + self.bias).square().mean()


def train(model: nn.Module, scaler: Any, *, fused: bool, unscales: bool) -> list[float]:
    """Five steps, of which the third overflows; the scale after each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scales = []
    for index in range(5):
        factors = torch.linspace(0.5, 1, 8)
        if index == 2:
            factors[-1] = 1e37  # times the scale
        optimizer.zero_grad()
        scaler.scale(model(factors)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def new_scaler(kind: Any = torch.amp.GradScaler) -> Any:
    """With scales that change after two steps."""
    return kind("cpu", init_scale=16.0, growth_interval=2)


def check_overflow_on_one_rank_is_one_on_all(rank: int, world: int) -> None:
    """The scale and the weights are one process's, for FSDP1's scaler, too."""
    plainly, for_fsdp1 = torch.amp.GradScaler, ShardedGradScaler  # the latter steps none fused
    for kind, fused, way, boundary, unscales in (
        *product([plainly], (False, True), WAYS, ["element"], (False, True)),
        *product([for_fsdp1], [False], ["ZeRO-3"], ["element"], (False, True)),
        *product([plainly], (False, True), ["ZeRO-3"], ["tensor"], [False]),
    ):
        plain, model = Scales(), fully_shard(Scales(), **options_of(way), boundary=boundary)
        options = {"fused": fused, "unscales": unscales}
        expected = train(plain, new_scaler(), **options)
        assert train(model, new_scaler(kind), **options) == expected == [16, 32, 16, 16, 32]
        assert distance(whole_state(model), whole_state(plain)) == 0, (way, options)


def check_it_is_on_one_rank_alone(rank: int, world: int) -> None:
    """What the other check stands on: one rank alone has an infinite gradient."""
    model = fully_shard(Scales())
    factors = torch.ones(8)
    factors[-1] = 1e37
    (model(factors) * 16).backward()
    finite = [bool(param.grad.to_local().isfinite().all()) for param in model.parameters()]
    ranks: list[Any] = [None] * world
    dist.all_gather_object(ranks, all(finite))
    assert ranks.count(False) == 1


def check_every_rank_that_shares_a_step_is_asked(rank: int, world: int) -> None:
    """An infinity in what one rank has of an ignored parameter, of a copy, and of a part."""
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("copies", "parts"))
    for options in ({}, options_of("replicated"), {"mesh": mesh}):
        plain = Scales()
        model = fully_shard(plain, ignored_params={plain.bias}, **options)
        before = whole_state(model)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), new_scaler()
        scaler.scale(model(torch.ones(8))).backward()
        if rank == 0:
            model.bias.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 8
        assert distance(whole_state(model), before) == 0


def check_rank_without_gradients_is_refused(rank: int, world: int) -> None:
    """torch's scaler looks at nothing there; the others must not wait for it."""
    model = fully_shard(Scales(), boundary="tensor")  # a vector for each rank
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), new_scaler()
    for factors in (torch.ones(8), torch.full((8,), 1e37), torch.ones(8)):
        optimizer.zero_grad()
        scaler.scale(model(factors)).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    scaler.scale(model(None)).backward()
    mine = model.bias.to_local().numel() > 0
    kind, text = (StateError, "has no gradient") if mine else (AssertionError, "No inf checks")
    if world > 1:
        raises(kind, text, lambda: scaler.step(optimizer))
