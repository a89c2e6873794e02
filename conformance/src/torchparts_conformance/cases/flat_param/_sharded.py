"""A small model, its sharded form, and training in one process, for cases on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

Backward = Callable[[nn.Module, Callable[[Tensor], Tensor]], None]
"""Runs backward passes of a module; the second argument gives a rank's share of a batch."""


def most_ranks(kind: str) -> int:
    """Two on the CPU; on accelerators the number of devices, at most two."""
    return 2 if kind == "cpu" else min(2, torch.accelerator.device_count())


def place(kind: str, rank: int) -> tuple[torch.device, dict[str, Any]]:
    """Return this rank's device, and options for sharding over all ranks."""
    if kind == "cpu":
        return torch.device(kind), {}
    torch.accelerator.set_device_index(rank)
    group = dist.new_group(backend=dist.get_default_backend_for_device(kind))
    return torch.device(kind, rank), {"mesh": DeviceMesh.from_group(group, kind)}


class Net(nn.Module):
    """Two residual blocks of odd sizes and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in "ab"
        )
        self.head = nn.Linear(5, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the blocks and the head."""
        for block in self.inner:
            x = x + block(x)
        return self.head(x)


def plain(seed: int = 0) -> Net:
    """Return the model of one process."""
    torch.manual_seed(seed)
    return Net()


def sharded(part: Any, seed: int = 0, **options: Any) -> Any:
    """Return the same model with one unit per block and one around them."""
    model = plain(seed)
    for block in model.inner:
        part.fully_shard(block, **options)
    return part.fully_shard(model, **options)


def batch(world_size: int, step: int = 0) -> Tensor:
    """Return the inputs of all ranks, `(2 * world_size, 5)`."""
    generator = torch.Generator().manual_seed(7 + step)
    return torch.randn(2 * world_size, 5, generator=generator)


def mine(inputs: Tensor, rank: int) -> Tensor:
    """Return one rank's inputs."""
    return inputs[2 * rank : 2 * rank + 2]


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return a rank's loss; the mean over ranks is the loss of the whole batch."""
    return model(inputs).square().mean()


def whole_state(module: nn.Module) -> dict[str, Any]:
    """Return the state dict with full tensors instead of shards. Collective."""
    state = module.state_dict()
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}


def train(model: nn.Module, shares: list[Tensor]) -> None:
    """Train with SGD and momentum: linear in the gradient, so rounding errors stay small."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for share in shares:
        optimizer.zero_grad()
        loss_of(model, share).backward()
        optimizer.step()


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Return the largest difference of two state dicts; NaN is kept.

    It is infinite if keys or shapes differ.
    """
    shapes = [[(name, each.shape) for name, each in state.items()] for state in (first, second)]
    if shapes[0] != shapes[1]:
        return float("inf")
    pairs = zip(first.values(), second.values(), strict=True)
    return torch.stack([(a - b).abs().max().double() for a, b in pairs]).max().item()


def stepped(module: nn.Module) -> dict[str, Tensor]:
    """Return the state after a step that adds each gradient unscaled."""
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    return whole_state(module)


def pair_distance(
    part: Any, rank: int, world_size: int, backward: Backward, **options: Any
) -> float:
    """Return the distance between a sharded and a plain model after the same backward passes."""
    reference, model = plain(), sharded(part, **options)
    backward(reference, lambda inputs: inputs)
    backward(model, lambda inputs: mine(inputs, rank))
    return distance(stepped(model), stepped(reference))
