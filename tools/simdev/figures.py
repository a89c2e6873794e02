"""`python -m simdev figures.py`: steps and reserved memory of offloads, from this folder.

Twelve blocks in virtual time, the host as far ahead as it can be. Time and memory are those of a
steady step: of `offload_` by plain's, with copies that take together half as long as that step; of
a policy by those of the same policy that keeps what the other moves, with copies as long as given.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
from torch import nn

import sac_policies
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


def steady(model: nn.Module, copy_us: float) -> tuple[float, int, int, int]:
    """Microseconds of a step, bytes it reserves beyond the weights, its copies out and back."""
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
    names = [row.name for row in SIM.timeline()]
    assert SIM.races() == []
    return us, reserved, names.count("copy to host"), names.count("copy to device")


class Region(nn.Module):
    """A block in a checkpoint with a policy."""

    def __init__(self, block: nn.Module, policy: sac_policies.Policy) -> None:
        super().__init__()
        self.block, self.policy = block, policy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the block."""
        return sac_policies.checkpoint(self.block, x, policy=self.policy, engine="contexts")


def print_offload(plain: nn.Module) -> None:
    """A row for each choice of options."""
    plain_us, plain_bytes, _, _ = steady(plain, 0)
    print("| options | steps | reserved |\n|---|---|---|")
    for options in ({}, {"keep_last": 1}):
        model = copy.deepcopy(plain)
        for block in model:
            offload_(block, **options)
        _, _, out, back = steady(model, 1)
        us, reserved, _, _ = steady(model, plain_us / 2 / (out + back))
        words = ", ".join(f"`{name}={value}`" for name, value in options.items()) or "none"
        print(f"| {words} | {us / plain_us:.3f} | {reserved / plain_bytes:.2f} |")


def print_policies(plain: nn.Module) -> None:
    """A row for each policy and length of a copy; out and back are copies of a step."""
    print("\n| offloaded | copy, us | out | back | steps | reserved |\n|---|---|---|---|---|---|")
    for ops in (("aten.addmm",), ("aten.addmm", "aten.gelu")):
        kept, moved = (
            nn.Sequential(*[Region(block, make(*ops)) for block in plain])
            for make in (sac_policies.save_ops, sac_policies.offload)
        )
        kept_us, kept_bytes, _, _ = steady(kept, 0)
        for copy_us in (75, 100, 175):
            us, reserved, out, back = steady(moved, copy_us)
            words = ", ".join(f"`{each}`" for each in ops)
            print(
                f"| {words} | {copy_us} | {out} | {back} | {us / kept_us:.3f} "
                f"| {reserved / kept_bytes:.2f} |"
            )


def main() -> None:
    """Print both tables."""
    plain = nn.Sequential(*[Block() for _ in range(BLOCKS)]).to(DEVICE)
    print_offload(plain)
    print_policies(plain)


if __name__ == "__main__":
    main()
