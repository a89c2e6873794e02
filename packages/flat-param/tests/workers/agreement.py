"""Two ranks that were given different modules or settings; one check per difference."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _harness import run_checks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flat_param import CommError, LayoutError, ParameterError, StateError, fully_shard
from flat_param.comm._comm import Communicator


class Layers(nn.Module):
    """Named tensors as parameters, in the order in which they are given."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


def layers(**changed: torch.Tensor | None) -> Layers:
    """Three parameters, some of them changed or left out."""
    tensors: dict[str, Any] = {
        "first": torch.zeros(4, 3),
        "second": torch.zeros(5),
        "third": torch.zeros(6),
        **changed,
    }
    return Layers(**{name: tensor for name, tensor in tensors.items() if tensor is not None})


def refused(call: Callable[[], object], text: str, kind: type[Exception] = CommError) -> None:
    """Assert an error with `text` in it, raised before any collective but the agreement."""
    started: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "_start", lambda self, what, *_: started.append(what))
        with pytest.raises(kind, match=re.escape(text)):
            call()
    assert not started


def unchanged(module: nn.Module) -> None:
    """Assert that the call did not change the module."""
    assert type(module) is Layers
    assert not hasattr(module, "_flat_param")


def differ(rank: int, change: dict[str, Any], text: str, **options: Any) -> None:
    """Assert that a change on the last rank is named on both, and changes nothing."""
    module = layers(**(change if rank else {}))
    shapes = [param.shape for param in module.parameters()]
    refused(lambda: fully_shard(module, **options), text)
    assert [param.shape for param in module.parameters()] == shapes
    unchanged(module)


def check_another_shape_is_named(rank: int, world: int) -> None:
    """The first parameter of another shape, with both shapes."""
    text = "parameter 'second' is (5,) of torch.float32 on rank 0 and (7,) of torch.float32 on rank"
    differ(rank, {"second": torch.zeros(7), "third": torch.zeros(1)}, text)


def check_another_dtype_is_named(rank: int, world: int) -> None:
    """A dtype is a difference."""
    differ(
        rank, {"third": torch.zeros(6, dtype=torch.bfloat16)}, "parameter 'third' is (6,) of tor"
    )


def check_another_stride_is_named(rank: int, world: int) -> None:
    """The same shape in another order of memory is a difference."""
    differ(rank, {"first": torch.zeros(3, 4).t()}, "(4, 3) of torch.float32, of stride (1, 4)")


def check_missing_parameter_is_named(rank: int, world: int) -> None:
    """What the first rank has and another has not, even where settings differ too."""
    text = "parameter 'second' is (5,) of torch.float32 on rank 0 and missing on rank 1"
    differ(rank, {"second": None}, text, boundary="tensor" if rank else "row")


def check_surplus_parameter_is_named(rank: int, world: int) -> None:
    """What the first rank has not and another has."""
    differ(rank, {"fourth": torch.zeros(2)}, "'fourth' is missing on rank 0 and (2,) of torch.floa")


def check_another_tie_is_named(rank: int, world: int) -> None:
    """A second name of a parameter is a difference."""
    module = layers()
    if rank:
        module.register_parameter("tied", module.third)
    text = "parameter 'third' is (6,) of torch.float32 on rank 0 and (6,) of torch.float32, tied to"
    refused(lambda: fully_shard(module), text)
    unchanged(module)


def check_another_order_is_named(rank: int, world: int) -> None:
    """The same parameters in another order."""
    tensors = {"first": torch.zeros(4, 3), "second": torch.zeros(5)}
    module = Layers(**(dict(reversed(tensors.items())) if rank else tensors))
    text = "parameter 'first' is before parameter 'second' on rank 0 and after it on rank 1"
    refused(lambda: fully_shard(module), text)


def check_frozen_on_one_rank_is_named(rank: int, world: int) -> None:
    """Trainability decides about segments, so it must be the same."""
    module = layers()
    module.second.requires_grad_(not rank)
    refused(lambda: fully_shard(module), "and (5,) of torch.float32, frozen on rank 1")


def check_another_mesh_is_named(rank: int, world: int) -> None:
    """Ranks whose meshes differ meet before they shard."""
    mesh = init_device_mesh("cpu", (world, 1))
    text = f"copies x ranks is 1 x {world} on rank 0 and {world} x 1 on rank 1"
    refused(lambda: fully_shard(layers(), mesh=mesh if rank else None), text)


def check_another_setting_is_named(rank: int, world: int) -> None:
    """Boundary and freeing decide about ranges and order."""
    for name, value in (("boundary", "row"), ("reshard_after_forward", False)):
        mine = {name: value} if rank else {}
        refused(lambda mine=mine: fully_shard(layers(), **mine), f"{name} is ")


def check_another_nesting_is_named(rank: int, world: int) -> None:
    """A unit that one rank has and the other has not."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    text = "parameter '0.weight' is (3, 2) of torch.float32 on rank 0 and missing on rank 1"
    refused(lambda: fully_shard(module[0] if rank else module), text)


def check_mistake_of_one_rank_is_an_error_on_all(rank: int, world: int) -> None:
    """The rank raises its own error, the others that of a rank that cannot follow."""
    text = "rank 1 cannot shard its module, but all ranks must shard the same one. "
    module, boundary = layers(), "column" if rank else "row"
    kind, expected = (LayoutError, "'column'") if rank else (CommError, text)
    refused(lambda: fully_shard(module, boundary=boundary), expected, kind)
    unchanged(module)
    with torch.device("meta"):
        odd = layers()
    kind, expected = (ParameterError, "reset_parameters") if rank else (CommError, text)
    refused(lambda: fully_shard(odd if rank else module), expected, kind)
    unchanged(module)
    fully_shard(module)
    kind, expected = (CommError, text) if rank == 0 else (StateError, "'SOME'")
    refused(lambda: fully_shard(layers(), mp_policy="SOME" if rank else None), expected, kind)


def check_agreeing_ranks_are_not_counted(rank: int, world: int) -> None:
    """Agreement is no part of what a step communicates."""
    assert fully_shard(layers()).comm_counts() == {}


if __name__ == "__main__":
    run_checks(globals())
