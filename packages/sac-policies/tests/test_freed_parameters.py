"""Parameters whose memory is freed while a region waits for backward, as FSDP does."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from sac_policies import MATMULS, MutationError, Policy, checkpoint, recompute_all, save_ops
from sac_policies._torch_compat import is_freed
from sac_policies.eager._guards import Guard


@pytest.mark.parametrize("numel", [8, 9000])
def test_guard_does_not_read_freed_memory(numel: int) -> None:
    """Neither of a small tensor nor of a large one."""
    tensor = torch.randn(2, numel)[1]
    guard = Guard(tensor)
    guard.check(tensor, MutationError)
    tensor.untyped_storage().resize_(0)
    assert is_freed(tensor)
    with pytest.raises(MutationError):
        guard.check(tensor, MutationError)


def test_empty_tensor_is_not_freed() -> None:
    """It has no elements to free."""
    assert not is_freed(torch.empty(0, 3))
    assert not is_freed(torch.ones(3))


class Block(nn.Module):
    """Its second layer may be sharded by itself: then it is gathered inside of the region."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Backward of the last layer reads what comes from the second one."""
        a, b = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(torch.cat([a * b, b], -1))


class Region(nn.Module):
    """A block under a policy."""

    def __init__(self, block: Block, policy: Policy) -> None:
        super().__init__()
        self.block, self.policy = block, policy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return checkpoint(self.block, x, policy=self.policy)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", [recompute_all(), save_ops(MATMULS)], ids=["nothing", "matmuls"])
def test_unit_inside_a_region_is_freed_before_backward_reads_it(policy: Policy) -> None:
    """What its parameters were read for is held; gradients are plain."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        blocks, x = [Block(), Block()], torch.randn(4, 8, 32)
        plain = nn.Sequential(*copy.deepcopy(blocks))
        plain(x).sum().backward()
        model = nn.Sequential(*(Region(block, policy) for block in blocks))
        for block, region in zip(blocks, model, strict=True):
            fully_shard(block.up)
            fully_shard(region)
        fully_shard(model)
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
        found = [p.grad.full_tensor() for p in model.parameters()]
        assert all(map(torch.equal, found, [p.grad for p in plain.parameters()]))
    finally:
        dist.destroy_process_group()
