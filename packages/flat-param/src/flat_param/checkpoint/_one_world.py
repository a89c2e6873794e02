"""The ranks that share a checkpoint, and which of them has what.

Note [Mesh of a checkpoint]
    Ranks have numbers along the axes of a mesh: first those that divide the units, then those of
    tensor parallel, then those of copies. The first copy saves, a part each. What tensor parallel
    has not cut, or not along an axis, is saved by the first rank along it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from .._errors import StateError
from ..comm._comm import CommLog, Communicator
from ..comm._groups import CommGroups
from ..dcp._tensor_slice import TensorSlice
from ..memory._dtensors import DTensorPlace
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
            f"flat_param.{function}: {type(module).__name__} is not sharded, but a part of it "
            "is asked for. Call fully_shard first."
        )
    comm = units[0].comms.gather
    for unit in units:
        if unit.comms.gather.world_size != comm.world_size:
            raise StateError(
                f"flat_param.{function}: units are cut into {comm.world_size} and "
                f"{unit.comms.gather.world_size} parts, but one checkpoint has one part per rank. "
                "Save their modules apart."
            )
    return OneWorld(units[0].comms, _parallel(units, function))


def _parallel(units: list[Unit], function: str) -> tuple[Communicator, ...]:
    places = (place for unit in units for part in unit.parts for place in part.places)
    meshes = list(dict.fromkeys(place.mesh for place in places if place is not None))
    if len(meshes) > 1:
        raise StateError(
            f"flat_param.{function}: parameters are DTensors over {meshes[0]} and {meshes[1]}, but "
            "all ranks of one checkpoint are in one mesh. Save their modules apart."
        )
    axes = ((mesh, axis) for mesh in meshes for axis in range(mesh.ndim))
    return tuple(
        Communicator(mesh.get_group(axis), log=CommLog())
        for mesh, axis in axes
        if mesh.size(axis) > 1
    )


def place_in(site: ParamSite) -> DTensorPlace | None:
    """How tensor parallel has cut the parameter at a site."""
    return site.part.places[site.index]


def whole_shape(site: ParamSite) -> tuple[int, ...]:
    """Of a parameter before anything was cut, as a checkpoint has it."""
    place = place_in(site)
    return site.part.pieces[site.index].spec.shape if place is None else tuple(place.shape)


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
