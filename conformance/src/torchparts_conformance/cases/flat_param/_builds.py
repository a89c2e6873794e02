"""Modules and handles for the cases of this area."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


class Group:
    """A fake process group with only a rank and a size."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        """This process's rank."""
        return self._rank

    def size(self) -> int:
        """The number of processes."""
        return self._size


def make_handle(part: Any, module: nn.Module, device: str, **changes: Any) -> Any:
    """Make a handle for all parameters of a module, with the arguments of the source's tests."""
    arguments = {
        "device": torch.device(device),
        "sharding_strategy": part.HandleShardingStrategy.FULL_SHARD,
        "offload_params": False,
        "mp_param_dtype": None,
        "mp_reduce_dtype": None,
        "keep_low_precision_grads": False,
        "process_group": Group(0, 1),
        "use_orig_params": False,
        "fsdp_extension": None,
    } | changes
    params = arguments.pop("params", None) or list(module.parameters())
    handle = part.FlatParamHandle(params, module, **arguments)
    assert isinstance(handle.flat_param, torch.Tensor), "a handle has a flat parameter"
    return handle


def linears(*sizes: int) -> nn.Sequential:
    """Linear layers without bias: `linears(3, 7, 5)` has weights (7, 3) and (5, 7)."""
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)))


class Blocks(nn.Module):
    """Four residual blocks; with `tied`, the last two share the first two's weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
            for _ in range(4)
        )

    def tie(self) -> None:
        """Share weights between blocks; moving the module may undo this."""
        for first, second in ((0, 2), (1, 3)):
            self.blocks[second][1].weight = self.blocks[first][1].weight
            self.blocks[second][3].weight = self.blocks[first][3].weight

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, 6)` to `(batch, 8)`."""
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def blocks(device: str, dtype: torch.dtype, *, tied: bool = False) -> tuple[Blocks, Tensor]:
    """Return a model and an input."""
    model = Blocks().to(device, dtype)
    if tied:
        model.tie()
    torch.manual_seed(1)
    return model, torch.rand(5, 6).to(device, dtype)


def holder(*tensors: Tensor) -> nn.Module:
    """A module with given tensors as parameters p0, p1, ..."""
    module = nn.Module()
    for index, tensor in enumerate(tensors):
        trainable = tensor.is_floating_point() or tensor.is_complex()
        kept = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, trainable)
        module.register_parameter(f"p{index}", kept)
    return module


def survives(part: Any, device: str, *tensors: Tensor, use_orig_params: bool = False) -> bool:
    """Whether tensors keep their values in a flat parameter."""
    expected = [tensor.tolist() for tensor in tensors]
    module = holder(*(tensor.to(device) for tensor in tensors))
    make_handle(part, module, device, use_orig_params=use_orig_params)
    return [getattr(module, f"p{index}").tolist() for index in range(len(tensors))] == expected
