"""Parameters whose memory is freed while a region waits for backward, as FSDP does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sac_policies import MutationError, RecomputeError, checkpoint, recompute_all
from sac_policies._torch_compat import is_freed
from sac_policies.engines._guards import Guard, small_copy


def _free(parameter: Tensor) -> None:
    parameter.untyped_storage().resize_(0)


class _Unit(nn.Linear):
    """Frees its parameters after its own forward; they come back with its backward."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        values = [each.detach().clone() for each in self.parameters()]
        if out.requires_grad:
            out.register_hook(lambda grad: self._gather(values))
        for each in self.parameters():
            _free(each)
        return out

    def _gather(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for each, value in zip(self.parameters(), values, strict=True):
                each.untyped_storage().resize_(value.nbytes)
                each.data.copy_(value)


SIZES = pytest.mark.parametrize("width", [8, 96], ids=["copied", "too large to copy"])


def _steps(width: int, unit: type[nn.Linear], body: Callable[..., Tensor], **options: Any) -> list:
    torch.manual_seed(0)
    layer, x = unit(width, width), torch.randn(4, width, requires_grad=True)
    found = []
    for _ in range(4):
        out = checkpoint(body, layer, x, **options) if options else body(layer, x)
        found += torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
    return found


def _saved(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).sin()


def _behind(layer: nn.Module, x: Tensor) -> Tensor:
    return (layer(x) + 1).sin()


@SIZES
def test_value_made_from_freed_parameters_is_kept(width: int, equal: Any) -> None:
    """A replay would read the parameters before backward reaches the unit that has them."""
    options = {"policy": recompute_all(), "engine": "recipe"}
    plain = _steps(width, nn.Linear, _saved)
    assert equal(_steps(width, _Unit, _saved, **options), plain)


@pytest.mark.parametrize("body", [_saved, _behind])
def test_replay_that_reads_freed_parameter_raises(body: Callable[..., Tensor]) -> None:
    """An error that says what to do, and no fault in memory."""
    layer, x = nn.Linear(96, 96), torch.randn(4, 96, requires_grad=True)
    out = checkpoint(body, layer, x, policy=recompute_all(), engine="recipe")
    _free(layer.weight)
    with pytest.raises(RecomputeError, match="has no data when a replay reads it"):
        out.sum().backward()


@SIZES
def test_recomputation_that_reads_freed_parameter_raises(width: int) -> None:
    """Where it would be compared with what it was."""
    weight, x = nn.Parameter(torch.randn(width, width)), torch.randn(width, requires_grad=True)

    def function(t: Tensor) -> Tensor:
        return (t * weight).sin()

    out = checkpoint(function, x, policy=recompute_all(), engine="contexts")
    _free(weight)
    with pytest.raises(MutationError):
        out.sum().backward()


@pytest.mark.parametrize("numel", [8, 9000])
def test_guard_does_not_read_freed_memory(numel: int) -> None:
    """Neither of a small tensor, which it copies on devices, nor of a large one."""
    tensor = torch.randn(2, numel)[1]
    guard = Guard(tensor)
    guard.check(tensor, MutationError)
    _free(tensor)
    assert is_freed(tensor)
    assert small_copy(tensor) is None
    assert not guard.is_same(tensor)
    with pytest.raises(MutationError):
        guard.check(tensor, MutationError)


def test_empty_tensor_is_not_freed() -> None:
    """It has no elements to free."""
    assert not is_freed(torch.empty(0, 3))
    assert not is_freed(torch.ones(3))
