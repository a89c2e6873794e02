"""The communicators of a device mesh, or of torch's default process group.

Note [Two communicators]
    Parameters are gathered in the order of forward and backward, and gradients are summed when they
    are ready. If a batch leaves a layer unused on one rank, the two orders interleave differently
    there. Gathers and sums therefore have separate process groups, each with a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._errors import StateError
from .._torch_compat import timeout_of
from ..buffers._dtensors import DTensorPlace
from ._comm import CommLog, Communicator

Spread = tuple[Communicator, ...]
"""Communicators over which a tensor is cut: of the unit, and of tensor parallelism."""


@dataclass(frozen=True)
class CommGroups:
    """The process groups of one unit.

    Attributes:
        gather: ranks that hold the shards of one replica.
        reduce: the same ranks, for gradients. See Note [Two communicators].
        replicate: ranks that hold the same shard of other replicas.
        copies: the same ranks as `replicate`, for the agreement at the end of a backward, which
            does not wait for gradients.
        log: counts the collectives of all three.
    """

    gather: Communicator
    reduce: Communicator
    replicate: Communicator
    copies: Communicator
    log: CommLog

    @cached_property
    def world_size(self) -> int:
        """Number of ranks whose gradients are averaged."""
        return self.reduce.world_size * self.replicate.world_size

    def name(self, unit: str) -> None:
        """Set the name of the unit in messages."""
        for comm in (self.gather, self.reduce, self.replicate):
            comm.unit = unit


_Group = dist.ProcessGroup
# Weakly: torch keeps a group until it is destroyed, see Note [Threads of gloo] in _exit.py.
_derived: WeakKeyDictionary[_Group, dict[object, ReferenceType[_Group]]] = WeakKeyDictionary()


def derived_group(
    group: _Group, key: object, ranks: Sequence[int], *, backend: str | None = None
) -> _Group:
    """A process group of `ranks`, made once for `group` and `key`. Collective for `ranks`.

    It has the timeout of `group`, also for ranks that are missing when it is made.
    """
    known = _derived.setdefault(group, {})
    found = known[key]() if key in known else None
    if found is None:
        found = cast(
            _Group,
            dist.new_group(
                list(ranks),
                timeout=timeout_of(group),
                backend=backend or dist.get_backend_config(group),
                use_local_synchronization=True,
            ),
        )
        known[key] = ref(found)
    return found


@dataclass(frozen=True)
class MeshGroups:
    """The process groups of a device mesh, or of all ranks.

    Attributes:
        shard: ranks that divide parameters; None if this rank has all of them.
        replicate: ranks that have the same part; None if there is one copy.
        meeting: communicators to all ranks of the mesh; their calls are not counted.
    """

    shard: _Group | None
    replicate: _Group | None
    meeting: tuple[Communicator, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> MeshGroups:
        """Not a collective."""
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            raise StateError(
                f"flat_param.fully_shard: mesh is {mesh!r}, but it must be a DeviceMesh of the "
                "ranks that share parameters. Pass init_device_mesh(...), "
                "DeviceMesh.from_group(...) for a process group, or None for all ranks."
            )
        if not dist.is_available() or not dist.is_initialized():
            raise StateError(
                "flat_param.fully_shard: there is no process group, but parameters are sharded "
                "over one. Call torch.distributed.init_process_group, or use flat_param.flatten."
            )
        world = cast(_Group, dist.group.WORLD)
        if mesh is None:
            return cls(world, None, (Communicator(world, log=CommLog()),))
        if mesh.ndim > 2:
            raise StateError(
                f"flat_param.fully_shard: mesh has {mesh.ndim} axes, but parameters are sharded "
                "over one axis, or replicated over the first of two and sharded over the second. "
                "Pass part of it, such as mesh['shard']."
            )
        has_copies = mesh.ndim == 2
        is_cut = mesh.size(mesh.ndim - 1) > 1 or not has_copies
        shard = mesh.get_group(mesh.ndim - 1) if is_cut else None
        replicate = mesh.get_group(0) if has_copies else None
        is_world = mesh.size() == dist.get_world_size()
        groups = (world,) if is_world else filter(None, (shard, replicate))
        return cls(shard, replicate, tuple(Communicator(each, log=CommLog()) for each in groups))

    def comms(self, *, log: CommLog) -> CommGroups:
        """The process groups of a unit. Collective: every rank of the world calls it."""
        shard, copies = self.shard, self.replicate
        groups = (shard, shard and _twin(shard), copies and _twin(copies), copies)
        gather, reduce, replicate, beside = [Communicator(group, log=log) for group in groups]
        for comm in (gather, reduce, replicate):
            if comm.trail is not None:
                comm.trail.units += 1
                comm.number = comm.trail.units
        return CommGroups(gather, reduce, replicate, beside, log)


def _twin(group: _Group) -> _Group:
    """Return a second process group of the same ranks."""
    return derived_group(group, "twin", dist.get_process_group_ranks(group))


def spread_of(place: DTensorPlace | None, log: CommLog) -> Spread:
    """Communicators over which tensor parallelism cuts a tensor with these placements."""
    return () if place is None else tuple(Communicator(each, log=log) for each in place.groups)
