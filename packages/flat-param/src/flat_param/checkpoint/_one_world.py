"""The ranks that share a checkpoint, and which of them has what.

Note [Mesh of a checkpoint]
    Ranks have numbers along the axes of a mesh: first those that divide the units, then those of
    tensor parallel, then those of copies. The first copy saves, a part each. What tensor parallel
    has not cut, or not along an axis, is saved by the first rank along it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._errors import StateError
from ..comm._comm import CommLog, Communicator
from ..comm._groups import CommGroups
from ..dcp._tensor_slice import TensorSlice, whole
from ..memory._dtensors import DTensorPlace, place_of_dtensor
from ..sharded._by_hand import units_below
from ..sharded._param_sites import ParamSite
from ..sharded._unit import Unit
from ._meeting import number_over


@dataclass(frozen=True)
class OneWorld:
    """See Note [Mesh of a checkpoint].

    Attributes:
        comms: of the outermost unit.
        parallel: of the axes of tensor parallel, in their order.
    """

    comms: CommGroups
    parallel: tuple[Communicator, ...]

    @property
    def axes(self) -> tuple[Communicator, ...]:
        """All of them."""
        return (self.comms.gather, *self.parallel, self.comms.replicate)

    @property
    def parts(self) -> int:
        """Ranks that save."""
        return math.prod(comm.world_size for comm in (self.comms.gather, *self.parallel))

    @property
    def saves(self) -> bool:
        """Whether this rank writes a part; the others have a copy of the same."""
        return self.comms.replicate.rank == 0

    @property
    def part(self) -> int:
        """The number of this rank's part."""
        return number_over((self.comms.gather, *self.parallel))

    def has_beside(self, place: DTensorPlace | None) -> bool:
        """Whether this rank saves what it has of a tensor in no unit, and no other has the same."""
        if place is None:
            return self.part == 0
        inside = set(place.mesh.mesh.flatten().tolist())
        others = (c for c in (self.comms.gather, *self.parallel) if not _ranks(c) <= inside)
        return place.is_first_copy and not any(comm.rank for comm in others)

    def has_own(self, place: DTensorPlace | None) -> bool:
        """Whether this rank saves what it has of a parameter, and no other rank has the same."""
        if place is not None:
            return place.is_first_copy
        return not any(comm.rank for comm in self.parallel)


def one_world(module: nn.Module, *, function: str = "save_sharded") -> OneWorld:
    """The ranks that share a module's checkpoint.

    Raises:
        StateError: the module is not sharded, or its units are not all divided by the same ranks.
    """
    units = list(units_below(module))
    if not units:
        raise StateError(
            f"flat_param.{function}: {type(module).__name__} is not sharded, but a part of it is "
            "requested. Call fully_shard first."
        )
    comm = units[0].comms.gather
    for unit in units:
        if unit.comms.gather.world_size != comm.world_size:
            raise StateError(
                f"flat_param.{function}: units are cut into {comm.world_size} and "
                f"{unit.comms.gather.world_size} parts, but one checkpoint has one part per rank. "
                "Save their modules separately."
            )
    return OneWorld(units[0].comms, _parallel(module, units, function))


def _parallel(module: nn.Module, units: list[Unit], function: str) -> tuple[Communicator, ...]:
    """Axes of tensor parallel: those over which units' parameters lie, or what is beside them."""
    places = [place for unit in units for part in unit.parts for place in part.places]
    places += [place_of_dtensor(each) for each in (*module.parameters(), *module.buffers())]
    found: dict[DeviceMesh, list[Communicator]] = {}
    known = [_ranks(units[0].comms.gather), _ranks(units[0].comms.replicate)]
    for mesh in dict.fromkeys(place.mesh for place in places if place is not None):
        groups = (mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1)
        axes = [Communicator(group, log=CommLog()) for group in groups]
        axes = [comm for comm in axes if _ranks(comm) not in known]
        known += map(_ranks, axes)
        found |= {mesh: axes} if axes else {}
    if len(found) > 1:
        first, second, *_ = found
        raise StateError(
            f"flat_param.{function}: parameters are DTensors over {first} and {second}, but all "
            "ranks of one checkpoint are in one mesh. Save their modules separately."
        )
    return tuple(comm for axes in found.values() for comm in axes)


def _ranks(comm: Communicator) -> frozenset[int]:
    """Of the world."""
    own = (dist.get_rank(),) if comm.group is None else dist.get_process_group_ranks(comm.group)
    return frozenset(own)


def place_in(site: ParamSite) -> DTensorPlace | None:
    """How tensor parallel has cut the parameter at a site."""
    return site.part.places[site.index]


def whole_shape(site: ParamSite) -> tuple[int, ...]:
    """Of a parameter before anything was cut, as a checkpoint has it."""
    place = place_in(site)
    return site.part.pieces[site.index].spec.shape if place is None else tuple(place.shape)


def slice_beside(key: str, local: Tensor, place: DTensorPlace | None) -> TensorSlice:
    """All that this rank has of a tensor that is in no unit.

    Args:
        key: in the checkpoint.
        local: of this rank; contiguous, where it is to be filled.
        place: where it lies; None: it is all.
    """
    within = None if place is None else (tuple(place.shape), place.offsets)
    return replace(whole(key, local), within=within)


def slice_of(key: str, site: ParamSite, elements: Tensor) -> TensorSlice:
    """This rank's piece of what is cut like the parameter at a site.

    Args:
        key: in the checkpoint.
        site: of the parameter.
        elements: `(numel,)` of the piece, in memory order.
    """
    piece, place = site.part.pieces[site.index], place_in(site)
    within = None if place is None else (tuple(place.shape), place.offsets)
    return TensorSlice(key, piece.spec, piece.start, elements, within)
