"""State that an optimizer has once per block, saved on some ranks and taken up on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _harness import same_bits
from torch import Tensor, nn

import flat_param

# Where ranks are cut, and elements of each parameter that share a scale.
KINDS: dict[str, tuple[Any, dict[str, int]]] = {
    "blocks": (flat_param.Blocks(32), {"matrix": 32, "bias": 32, "stack": 32}),
    "tiles": (flat_param.Blocks((4, 8)), {"matrix": 4 * 15, "bias": 8, "stack": 4 * 5}),
    "rows": ("row", {"matrix": 15, "bias": 1, "stack": 40}),
    "chosen": (
        flat_param.by_name({"matrix": flat_param.Blocks(32)}, default="row"),
        {"matrix": 32, "bias": 1, "stack": 40},
    ),
}
BEFORE, AFTER = range(3), range(3, 6)


class Weights(nn.Module):
    """Whose gradients are small integers, so that their mean over any ranks is exact."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(30, 15))
        self.bias = nn.Parameter(torch.randn(45))
        self.stack = nn.Parameter(torch.randn(3, 8, 5))

    def forward(self, step: int) -> Tensor:
        """A number of which every rank has the same."""
        generator = torch.Generator().manual_seed(step)
        total = torch.zeros(())
        for param in (self.matrix, self.bias, self.stack):
            factors = torch.randint(-4, 5, param.shape, generator=generator)
            total = total + (param * factors).sum()
        return total


class Momentum8bit(torch.optim.Optimizer):
    """SGD with momentum in numbers of 8 bits, and a scale for each block."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step every parameter that this rank has something of."""
        pairs = (
            (param, group["block"]) for group in self.param_groups for param in group["params"]
        )
        for param, size in pairs:
            if param.numel():
                self._step(param, size, self.state[param])

    def _step(self, param: Tensor, size: int, state: dict[str, Any]) -> None:
        numel = param.numel()
        moment = nn.functional.pad(param.grad.flatten(), (0, -numel % size)).view(-1, size)
        if state:
            assert not state["codes"].is_floating_point()
            moment = moment + 0.9 * state["codes"] * state["scales"][:, None]
        param.sub_(0.01 * moment.flatten()[:numel].view_as(param))
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        state["scales"] = moment.abs().amax(1).clamp(min=1e-12) / 127
        state["codes"] = (moment / state["scales"][:, None]).round().to(torch.int8)


def made(kind: str, *, sharded: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer; `kind` names where ranks are cut."""
    boundary, sizes = KINDS[kind]
    model: nn.Module = Weights()
    if sharded:
        model = flat_param.fully_shard(model, boundary=boundary)
    named = model.named_parameters()
    groups = [{"params": [p], "block": sizes[name]} for name, p in named]
    return model, Momentum8bit(groups, {})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Some steps."""
    for step in steps:
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors under flat names. Collective."""
    full = flat_param.full_state_dict(model, optimizer=optimizer)
    found = dict(full["model"])
    for name, values in full["optim"]["state"].items():
        found |= {f"{name}.{key}": value for key, value in values.items()}
    return found


def alone(kind: str, steps: range) -> dict[str, Tensor]:
    """What one process has after some steps."""
    model, optimizer = made(kind, sharded=False)
    train(model, optimizer, steps)
    found = {name: param.detach() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[param].items()}
    return found


def save(kind: str, folder: Path, rank: int) -> None:
    """Train and save."""
    model, optimizer = made(kind)
    train(model, optimizer, BEFORE)
    same_bits(state_of(model, optimizer), alone(kind, BEFORE))
    flat_param.save_sharded(model, folder / kind, optimizer=optimizer)
    full = flat_param.full_state_dict(model, optimizer=optimizer)
    if rank == 0:
        torch.save(full, folder / f"{kind}.pt")


def resume(kind: str, folder: Path) -> None:
    """Take up each of them; state and further steps are those of one process."""
    for source in (kind, f"{kind}.pt"):
        model, optimizer = made(kind)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        flat_param.load_sharded(model, folder / source, optimizer=optimizer)
        same_bits(state_of(model, optimizer), alone(kind, BEFORE))
        train(model, optimizer, AFTER)
        same_bits(state_of(model, optimizer), alone(kind, range(AFTER.stop)))


def refuse(rank: int, world: int) -> None:
    """Rows that are no blocks', and rows that differ between ranks, on every rank."""
    model, optimizer = made("blocks")
    train(model, optimizer, BEFORE)
    odd, key = optimizer.state[model.matrix], "scales"
    rows = len(odd[key])

    def refused(words: str) -> None:
        text = f"'{key}' of parameter 'matrix' {words}"
        with pytest.raises(flat_param.FlatParamError, match=text):
            flat_param.full_state_dict(model, optimizer=optimizer)

    odd[key] = torch.ones(rows, 1 + rank)
    refused("has shape .* on one rank and .* on another")
    odd[key] = optimizer.state[model.stack][key] = torch.ones(rows)
    refused("is shared with parameter 'stack' and has as many rows")
    odd[key] = torch.ones(rows + 1)
    refused("has a tensor of shape .* with a row for each of its bl")


def run(rank: int, world: int, folder: str, action: str) -> str:
    """One part of the story for all kinds."""
    for kind in KINDS:
        if action == "save":
            save(kind, Path(folder), rank)
        else:
            resume(kind, Path(folder))
        dist.barrier()
    if world > 1:
        refuse(rank, world)
    return action
