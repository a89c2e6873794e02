"""One segment's gradients, from leaves to parameters, as some ranks in one process have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flat_param import fully_shard
from flat_param.sharded._sharded_grads import ShardedGrads
from flat_param.sharded._sharded_params import ShardedParams

Make = Callable[..., list[ShardedParams]]


class Made(TorchDispatchMode):
    """Notes the sizes of tensors that are made of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("empty", "zeros", "new_empty", "new_zeros"):
            self.sizes.append(out.numel())
        return out


@pytest.mark.usefixtures("group_of_one")
def test_summed_gradients_have_no_memory_but_their_own() -> None:
    """From the second step on they are summed where the optimizer finds them."""
    model = fully_shard(nn.Linear(31, 17))
    x, made = torch.randn(3, 31), Made()
    numel = sum(param.numel() for param in model.parameters())
    for step in range(3):
        model.zero_grad()
        loss = model(x).sum()
        if step:
            with made:
                loss.backward()
        else:
            loss.backward()
    assert max(made.sizes, default=0) < numel


def _reduce(all_grads: list[ShardedGrads], used: list[bool] | None = None) -> None:
    for pending in [grads.start_reduce() for grads in all_grads]:
        pending.wait()
    for grads in all_grads:
        grads.assign_grads([True] * len(grads.leaves) if used is None else used)


def _give(grads: ShardedGrads, *values: Tensor | None) -> None:
    for index, value in enumerate(values):
        if value is not None:
            grads.owner.leaves[index].grad = value.clone()
            grads.take(index)


@pytest.mark.parametrize("boundary", ["element", "row", "tensor"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_gets_its_piece_of_the_mean(
    parts_of_ranks: Make, world: int, boundary: str
) -> None:
    """Whatever is cut where."""
    tensors = torch.randn(5, 3), torch.randn(7)
    parts = parts_of_ranks(world, *tensors, boundary=boundary)
    all_grads = [ShardedGrads(part) for part in parts]
    given = [[torch.randn_like(each) for each in tensors] for _ in parts]
    for grads, values in zip(all_grads, given, strict=True):
        _give(grads, *values)
    _reduce(all_grads)
    for part in parts:
        for index, param in enumerate(part.params):
            mean = torch.stack([values[index] for values in given]).mean(0)
            if part.leaves_out(index):
                assert param.grad is None
            else:
                assert torch.allclose(param.grad, part.cut(index, mean))
