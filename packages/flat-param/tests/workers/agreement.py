"""Two ranks that were given different modules or settings; one check per difference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _harness import raises
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flat_param import CommError, LayoutError, ParameterError, StateError, fully_shard


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


def unchanged(module: nn.Module) -> None:
    """Assert that the call did not change the module."""
    assert type(module) is Layers
    assert not hasattr(module, "_flat_param")


def tied() -> Layers:
    """One of the parameters has a second name."""
    module = layers()
    module.register_parameter("tied", module.third)
    return module


def frozen() -> Layers:
    """Trainability decides about segments."""
    module = layers()
    module.second.requires_grad_(False)
    return module


DIFFERENT: tuple[tuple[Callable[[], Layers], str], ...] = (
    (
        lambda: layers(second=torch.zeros(7), third=torch.zeros(1)),
        "(5,) of torch.float32 where rank 1 has parameter 'second' (7,) of torch.float32",
    ),
    (
        lambda: layers(third=torch.zeros(6, dtype=torch.bfloat16)),
        "rank 1 has parameter 'third' (6,) of torch.bfloat16",
    ),
    (
        lambda: layers(first=torch.zeros(3, 4).t()),
        "(4, 3) of torch.float32, of stride (1, 4)",
    ),
    (
        lambda: layers(fourth=torch.zeros(2)),
        "rank 1 has parameter 'fourth' (2,) of torch.float32",
    ),
    (
        lambda: Layers(second=torch.zeros(5), first=torch.zeros(4, 3), third=torch.zeros(6)),
        "parameter 'first' (4, 3) of torch.float32 where rank 1 has parameter 'second' (5,)",
    ),
    (tied, "rank 1 has parameter 'third' (6,) of torch.float32, tied to tied"),
    (frozen, "rank 1 has parameter 'second' (5,) of torch.float32, frozen"),
)


def check_first_different_parameter_is_named(rank: int, world: int) -> None:
    """On both ranks; nothing has changed then."""
    for make, text in DIFFERENT:
        module = make() if rank else layers()
        shapes = [param.shape for param in module.parameters()]
        raises(CommError, text, partial(fully_shard, module))
        assert [param.shape for param in module.parameters()] == shapes
        unchanged(module)


def check_missing_parameter_is_named_before_settings(rank: int, world: int) -> None:
    """They may differ because of it."""
    text = "rank 0 has parameter 'second' (5,) of torch.float32 where rank 1 has parameter 'third'"
    module = layers(**({"second": None} if rank else {}))
    boundary = "tensor" if rank else "row"
    raises(CommError, text, partial(fully_shard, module, boundary=boundary))


def check_another_setting_is_named(rank: int, world: int) -> None:
    """Mesh, boundary and freeing decide about ranges and order."""
    meshes = f"copies x ranks 1 x {world} where rank 1 has copies x ranks {world} x 1"
    for name, value, text in (
        ("boundary", "row", "boundary "),
        ("reshard_after_forward", False, "reshard_after_forward "),
        ("mesh", init_device_mesh("cpu", (world, 1)), meshes),
    ):
        mine = {name: value} if rank else {}
        raises(CommError, f"rank 0 has {text}", partial(fully_shard, layers(), **mine))


def check_another_nesting_is_named(rank: int, world: int) -> None:
    """A unit that one rank has and the other has not."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    text = "rank 0 has parameter '0.weight' (3, 2) of torch.float32 where rank 1 has parameter"
    raises(CommError, text, lambda: fully_shard(module[0] if rank else module))


def check_mistake_of_one_rank_is_an_error_on_all(rank: int, world: int) -> None:
    """The rank raises its own error, the others that of a rank that cannot follow."""
    text = "rank 1 cannot shard its module, but all ranks must shard the same one. "
    module, boundary = layers(), "column" if rank else "row"
    kind, expected = (LayoutError, "'column'") if rank else (CommError, text)
    raises(kind, expected, lambda: fully_shard(module, boundary=boundary))
    unchanged(module)
    with torch.device("meta"):
        odd = layers()
    kind, expected = (ParameterError, "reset_parameters") if rank else (CommError, text)
    raises(kind, expected, lambda: fully_shard(odd if rank else module))
    unchanged(module)
    fully_shard(module)
    kind, expected = (CommError, text) if rank == 0 else (StateError, "'SOME'")
    raises(kind, expected, lambda: fully_shard(layers(), mp_policy="SOME" if rank else None))


def check_agreeing_ranks_are_not_counted(rank: int, world: int) -> None:
    """Agreement is no part of what a step communicates."""
    assert fully_shard(layers()).comm_counts() == {}
