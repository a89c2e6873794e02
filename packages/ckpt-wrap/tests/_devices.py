"""Blocks and inputs for tests on accelerators, including the simulated one, and pytest marks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ckpt_wrap import offload_

ON_AN_ACCELERATOR = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]
KIND = torch.accelerator.current_accelerator() or torch.device("cpu")
SIM = getattr(torch, "simdev", None)
SIMULATED = pytest.mark.skipif(SIM is None, reason="needs the simulated device")
TWO = pytest.mark.skipif(
    torch.accelerator.device_count() < 2, reason="needs two devices of one kind"
)
FAR_AHEAD = {"kernel_us": 100, "copy_us": 50, "virtual": True}
SLOW_COPIES = {"kernel_us": 100, "copy_us": 5000, "virtual": True}


class Block(nn.Module):
    """Two matmuls with activations between them."""

    def __init__(self, features: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


def device(index: int = 0) -> torch.device:
    """One of the accelerators."""
    return torch.device(KIND.type, index)


def blocks(count: int, where: torch.device, seed: int = 0) -> nn.Sequential:
    """A chain of blocks."""
    torch.manual_seed(seed)
    return nn.Sequential(*[Block() for _ in range(count)]).to(where)


def offloaded(model: nn.Sequential, **options) -> nn.Sequential:
    """The same weights, each block offloaded."""
    twin = copy.deepcopy(model)
    for block in twin:
        offload_(block, **options)
    return twin


def given(where: torch.device, rows: int = 128) -> torch.Tensor:
    """An input that requires grad."""
    return torch.linspace(-1, 1, rows * 64).view(rows, 64).to(where).requires_grad_()


def found(models, inputs) -> list[torch.Tensor]:
    """Gradients, copied to the host after all devices are synchronized."""
    synchronize()
    wanted = [*inputs, *(p for model in models for p in model.parameters())]
    return [t.grad.cpu() for t in wanted]


def synchronize() -> None:
    """Wait for every device."""
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)


def same(a, b) -> bool:
    """Whether the gradients are bit-identical."""
    return len(a) == len(b) and all(map(torch.equal, a, b))


def simulate(**costs) -> None:
    """Set the durations of the simulated device; a no-op on a real one."""
    if SIM is not None:
        SIM.simulate(**costs)
