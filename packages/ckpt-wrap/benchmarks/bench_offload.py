"""How many copies does offload make, and what does a step cost over a folder?"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs

from ckpt_wrap import checkpoint_, offload_, offload_stats, offload_wrapper


class Reuse(nn.Module):
    """Saves two distinct tensors seven times."""

    def forward(self, x):
        """Sines and products of x."""
        return torch.sin(x) + torch.cos(x) + torch.tanh(x) * x + x * x


class Block(nn.Module):
    """A pre-norm feed-forward block."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        """Residual of the feed-forward layers."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _torchs_copies(module, x):
    copies, original = [], torch.Tensor.copy_
    torch.Tensor.copy_ = lambda self, *a, **k: copies.append(1) or original(self, *a, **k)
    try:
        module(x)
    finally:
        torch.Tensor.copy_ = original
    return len(copies)


def test_copies(tmp_path, capsys):
    """Copies equal distinct storages to a folder, and none are made from the CPU to the CPU."""
    x = torch.randn(16, 16, requires_grad=True)
    to_folder = offload_(Reuse(), to=tmp_path)
    to_folder(x)
    counts = {
        "to a folder": offload_stats(to_folder).copies_out,
        "to host memory, from it": _torchs_copies(offload_wrapper(Reuse()), x),
        "torch's wrapper": _torchs_copies(torchs.offload_wrapper(Reuse()), x),
    }
    with capsys.disabled():
        print("\ncopies of 2 distinct storages:", counts)
    assert counts["to a folder"] == 2
    assert counts["to host memory, from it"] == 0


@pytest.mark.parametrize("rows", [512])
def test_step(rows, tmp_path, side_by_side):
    """Eight blocks, one step: plain, checkpointed, and inputs or everything in a folder."""
    plain = nn.Sequential(*[Block() for _ in range(8)])
    models = {"plain": plain}
    for name, change in {
        "checkpointed": checkpoint_,
        "offloaded": lambda m: offload_(m, to=tmp_path),
        "both": lambda m: offload_(checkpoint_(m), to=tmp_path),
    }.items():
        models[name] = copy.deepcopy(plain)
        for block in models[name]:
            change(block)
    x = torch.randn(rows, 256)
    side_by_side(
        {n: lambda m=m: m(x).sum().backward() for n, m in models.items()}, number=1, rounds=5
    )
    moved = {n: offload_stats(m).peak_bytes_away for n, m in models.items()}
    assert moved["both"] == 8 * x.nbytes
    assert moved["plain"] == moved["checkpointed"] == 0
