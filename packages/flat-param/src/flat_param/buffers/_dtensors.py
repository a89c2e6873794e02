"""DTensor parameters, which tensor parallelism has sharded over another mesh axis.

- The plain local tensor is laid out, sharded, reduced and stepped.
- The module and its state dict have DTensors over it, with the original placements.
- A gradient is redistributed to the parameter's placements first. That is communication on the
  other axis, in the order in which autograd reaches the parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._errors import ParameterError, StateError
from .._torch_compat import dtensor_offsets

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


@dataclass(frozen=True)
class DTensorPlace:
    """The mesh and placements of a DTensor.

    Attributes:
        mesh: the axes of tensor parallelism.
        placements: one per axis.
        shape: global shape.
        stride: global stride.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def __str__(self) -> str:
        """The same text on every rank with the same local shape."""
        return f"{tuple(self.shape)} as {self.placements}"

    def over(self, local: Tensor) -> Tensor:
        """A DTensor over this rank's part, outside autograd."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local.detach(),
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )

    def local_of_grad(self, grad: Any) -> Tensor:
        """This rank's part of a gradient. Collective if its placements differ."""
        with torch.no_grad():
            placed = grad.redistribute(placements=self.placements)
            local: Tensor = placed.to_local()
        return local

    def local_of_value(self, value: Tensor) -> Tensor:
        """This rank's part of a DTensor of the same placements, or of a plain whole tensor.

        Not a collective. Any other value is returned unchanged.
        """
        if is_dtensor(value):
            return local_of(value) if self == place_of_dtensor(value) else value
        if tuple(value.shape) != tuple(self.shape):
            return value
        from torch.distributed.tensor import distribute_tensor

        whole = value.detach().to(self.mesh.device_type)
        return local_of(distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return the start of this rank's part along each dimension.

        Raises:
            StateError: a placement has no such start.
        """
        for placement in self.placements:
            if type(placement).__name__ not in ("Shard", "Replicate"):
                raise StateError(
                    f"flat_param.save_sharded: a DTensor of shape {tuple(self.shape)} has the "
                    f"placement {placement}, but only parts in the order of ranks have a place in "
                    "a checkpoint. Save its state_dict() with torch.distributed.checkpoint."
                )
        return dtensor_offsets(self.shape, self.mesh, self.placements)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the process groups over which the tensor is cut."""
        return tuple(
            self.mesh.get_group(axis)
            for axis, placement in enumerate(self.placements)
            if placement.is_shard()
        )


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is a DTensor. Does not import torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def place_of_dtensor(tensor: Any) -> DTensorPlace | None:
    """The mesh and placements of a DTensor; None for a plain tensor."""
    if not is_dtensor(tensor):
        return None
    return DTensorPlace(
        tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(tensor.stride())
    )


def as_dtensor(value: Any, like: Tensor) -> Any:
    """A plain whole tensor as a DTensor with the placements of `like`; other values unchanged."""
    place = place_of_dtensor(like)
    whole = isinstance(value, Tensor) and not is_dtensor(value) and value.shape == like.shape
    return place.over(place.local_of_value(value)) if place is not None and whole else value


def local_of(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, outside autograd, sharing memory; else the tensor."""
    if not is_dtensor(tensor):
        plain: Tensor = tensor
        return plain
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


def as_plain(param: nn.Parameter, values: Tensor) -> nn.Parameter:
    """The parameter over `values`; for a DTensor a new plain parameter with its attributes."""
    if not is_dtensor(param):
        param.data = values
        return param
    plain = nn.Parameter(values, requires_grad=param.requires_grad)
    attributes = {key: value for key, value in vars(param).items() if not key.startswith("_")}
    vars(plain).update(attributes)
    return plain


def check_places(
    named: Sequence[tuple[str, nn.Parameter]], ranks: Sequence[int], *, me: int
) -> None:
    """Refuse DTensors that a unit cannot divide over global `ranks`."""
    for name, param in named:
        place = place_of_dtensor(param)
        if place is None:
            continue
        if any(placement.is_partial() for placement in place.placements):
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{name}' is a DTensor with placements "
                f"{place.placements}, but a partial one has no value on any rank. "
                "Redistribute it first."
            )
        if local_of(param).is_meta:
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{name}' is a DTensor on meta, but only plain "
                "parameters are given values here. Call to_empty and initialise it first."
            )
        others = (set(place.mesh.mesh.flatten().tolist()) - {me}) & set(ranks)
        if others:
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{name}' is a DTensor over ranks that would "
                f"shard it, too ({sorted(others)}), but tensor parallelism and sharding need an "
                "axis each. Pass the other axis of the mesh, such as mesh['dp'], and do not call "
                "fully_shard of torch on a part of the module."
            )
