"""`python -m simdev figures.py`: steps and reserved memory of `offload_`, from this folder.

Twelve blocks in virtual time, the host as far ahead as it can be, and copies that take together
half as long as the plain step. Time and memory are those of a steady step, by plain's.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
from torch import nn

from ckpt_wrap import offload_

WIDTH, ROWS, BLOCKS, KERNEL_US, STEPS = 64, 1024, 12, 100.0, 3
SIM: Any = torch.get_device_module("simdev")
DEVICE = torch.device("simdev", 0)


class Block(nn.Module):
    """Two products and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, width) to the same."""
        return self.down(nn.functional.gelu(self.up(x)))


def steady(model: nn.Module, copy_us: float) -> tuple[float, int, int]:
    """Microseconds of a step, bytes that it reserves beyond the weights, and its copies."""
    SIM.reset()
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).to(DEVICE).requires_grad_()
    SIM.simulate(virtual=True, log=True, kernel_us=KERNEL_US, copy_us=copy_us)
    for _ in range(STEPS):
        model.zero_grad()
        x.grad = None
        gc.collect()
        SIM.synchronize_all()
        SIM.empty_cache()
        SIM.timeline()
        before, start = SIM.memory()["reserved"], SIM.host_us()
        SIM.reset_peak_memory_stats()
        model(x).square().sum().backward()
        SIM.synchronize_all()
        us, reserved = SIM.host_us() - start, SIM.memory()["reserved_peak"] - before
    copies = sum(row.name.startswith("copy to") for row in SIM.timeline())
    assert SIM.races() == []
    return us, reserved, copies


def main() -> None:
    """Print a row for each choice of options."""
    plain = nn.Sequential(*[Block() for _ in range(BLOCKS)]).to(DEVICE)
    plain_us, plain_bytes, _ = steady(plain, 0)
    print("| options | steps | reserved |\n|---|---|---|")
    for options in ({}, {"keep_last": 1}):
        model = copy.deepcopy(plain)
        for block in model:
            offload_(block, **options)
        _, _, copies = steady(model, 1)
        us, reserved, _ = steady(model, plain_us / 2 / copies)
        words = ", ".join(f"`{name}={value}`" for name, value in options.items()) or "none"
        print(f"| {words} | {us / plain_us:.3f} | {reserved / plain_bytes:.2f} |")


if __name__ == "__main__":
    main()
