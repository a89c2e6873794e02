"""Regions of modules whose parameters FSDP gathers, on two ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from torchparts_conformance import requirement


class _Block(nn.Module):
    """A gated residual layer that views its input twice; (rows, 8) in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x.view(-1, 2, 8)).view(-1, 8)
        return x + self.down(F.silu(self.up(y)))


def _save_everything(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return True


def _gradients(call: Any, rank: int, world_size: int) -> list[torch.Tensor]:
    """Full gradients of two steps over two sharded blocks."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(_Block() for _ in range(2))
    mesh = init_device_mesh("cpu", (world_size,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    torch.manual_seed(rank + 1)
    found = []
    for _ in range(2):
        x = y = torch.randn(6, 8, requires_grad=True)
        for block in blocks:
            y = call(block, y)
        y.square().sum().backward()
        found += [x.grad, *(p.grad.full_tensor() for p in blocks.parameters())]
        blocks.zero_grad()
    return found


def _trains_alike(part: Any, rank: int, world_size: int) -> bool:
    plain = _gradients(lambda block, x: block(x), rank, world_size)
    saved = _gradients(
        lambda block, x: part.checkpoint(block, x, policy=_save_everything), rank, world_size
    )
    return all(map(torch.equal, plain, saved))


@requirement(
    "SP-045",
    "A region around a module that FSDP shards MUST give the gradients without checkpointing, "
    "with any policy.",
    rationale=(
        "pytorch#185178, pytorch#196862; on 2.13 operators of the all-gather shift the saved values"
    ),
)
def test_sharded_blocks_with_everything_saved(part, ranks):
    """FSDP's all-gather runs in forward only and must not shift saved values."""
    assert ranks(2, _trains_alike) == [True, True]
