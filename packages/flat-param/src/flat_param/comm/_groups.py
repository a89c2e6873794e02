"""Turns a device mesh or torch's default process group into communicators.

Note [Two communicators]
    Whole parameters are gathered in the order of the forward and backward passes, gradients are
    summed as they become ready. Where a batch leaves a layer unused on one rank only, the two
    orders interleave differently on that rank. Each therefore has a process group of its own, and
    within each the order is fixed (Rule 3 in _comm.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._errors import StateError
from ._comm import CommLog, Communicator
from ._trail import next_number


@dataclass(frozen=True)
class CommGroups:
    """The process groups of one unit.

    Attributes:
        gather: ranks that hold the parts of one copy of the parameters.
        reduce: the same ranks, for gradients. See Note [Two communicators].
        replicate: ranks that hold the same part of other copies.
        log: counts the collectives of all three.
    """

    gather: Communicator
    reduce: Communicator
    replicate: Communicator
    log: CommLog

    @property
    def world_size(self) -> int:
        """Ranks whose gradients are averaged."""
        return self.reduce.world_size * self.replicate.world_size

    @contextmanager
    def telling_others(self) -> Iterator[None]:
        """Tell all ranks that share the unit of an error, since this one does not go on.

        Not a collective.
        """
        try:
            yield
        except Exception as error:
            self.gather.refuse(str(error))
            self.replicate.refuse(str(error))
            raise

    def name(self, unit: str) -> None:
        """Say in messages whose collectives these are."""
        for comm in (self.gather, self.reduce, self.replicate):
            comm.rename(unit)

    def share_change(self, change: str) -> None:
        """Wait until all of them have made a change of dtype or device.

        Raises:
            CommError: another rank made another change, or none.
        """
        self.gather.share_change(change)
        self.replicate.share_change(change)


# Weakly: torch keeps a group until it is destroyed, see Note [Threads of gloo] in _exit.py.
_twins: WeakKeyDictionary[dist.ProcessGroup, ReferenceType[dist.ProcessGroup]] = WeakKeyDictionary()


def make_comm_groups(mesh: DeviceMesh | None, *, log: CommLog) -> CommGroups:
    """Choose the process groups of a unit. Collective: every rank of the world calls it.

    Raises:
        StateError: there is no process group, or the mesh has more than two axes.
    """
    shard, replicate = _groups(mesh)
    groups = (shard, shard and _twin(shard), replicate and _twin(replicate))
    to_gather, to_reduce, to_replicate = (
        Communicator(g, log=log, number=next_number(g)) for g in groups
    )
    return CommGroups(to_gather, to_reduce, to_replicate, log)


def meeting_comms(mesh: DeviceMesh | None) -> tuple[Communicator, ...]:
    """Communicators that lead to all ranks that shard together.

    Not a collective; what travels there is not counted.

    Raises:
        StateError: there is no process group.
    """
    return tuple(Communicator(group, log=CommLog()) for group in _meeting_groups(mesh))


def _meeting_groups(mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise StateError(
            f"flat_param.fully_shard: mesh is {mesh!r}, but it must be a DeviceMesh of the ranks "
            "that share parameters. Pass init_device_mesh(...), DeviceMesh.from_group(...) for a "
            "process group, or None for all ranks."
        )
    world = _one_group(None)
    if mesh is None or mesh.size() == dist.get_world_size():
        return [world]
    return [mesh.get_group(axis) for axis in reversed(range(mesh.ndim))]


def group_sizes(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Copies of the parameters, and ranks that divide each. Not a collective.

    Raises:
        StateError: as `make_comm_groups`.
    """
    shard, replicate = _groups(mesh)
    replicas = 1 if replicate is None else dist.get_world_size(replicate)
    return replicas, 1 if shard is None else dist.get_world_size(shard)


def ranks_together(mesh: DeviceMesh | None) -> tuple[int, ...]:
    """Ranks of the world that hold a part or a copy of what this one holds. Not a collective.

    Raises:
        StateError: as `make_comm_groups`.
    """
    groups = _groups(mesh)
    found = {rank for each in groups if each for rank in dist.get_process_group_ranks(each)}
    return tuple(sorted(found))


def _groups(
    mesh: DeviceMesh | None,
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Ranks that divide parameters, and those that hold the same part."""
    if mesh is None or mesh.ndim == 1:
        return _one_group(mesh), None
    if mesh.ndim != 2:
        raise StateError(
            f"flat_param.fully_shard: mesh has {mesh.ndim} axes, but parameters are sharded over "
            "one axis, or replicated over the first of two and sharded over the second. Pass "
            "part of it, such as mesh['shard']."
        )
    return None if mesh.size(1) == 1 else mesh.get_group(1), mesh.get_group(0)


def _one_group(mesh: DeviceMesh | None) -> dist.ProcessGroup:
    if mesh is not None:
        return mesh.get_group()
    if not dist.is_available() or not dist.is_initialized():
        raise StateError(
            "flat_param.fully_shard: there is no process group, but parameters are sharded over "
            "one. Call torch.distributed.init_process_group, or use flat_param.flatten."
        )
    return cast(dist.ProcessGroup, dist.group.WORLD)


_parts: WeakKeyDictionary[dist.ProcessGroup, dict[int, ReferenceType[dist.ProcessGroup]]]
_parts = WeakKeyDictionary()


def comm_of_part(comms: CommGroups, size: int) -> Communicator:
    """This rank and its neighbours, `size` of those that divide a unit.

    Collective for them, where it is asked for the first time.
    """
    group = cast(dist.ProcessGroup, comms.gather.group)
    known = _parts.setdefault(group, {})
    part = known[size]() if size in known else None
    if part is None:
        ranks = dist.get_process_group_ranks(group)
        first = comms.gather.rank // size * size
        part = dist.new_group(
            ranks[first : first + size],
            backend=dist.get_backend_config(group),
            use_local_synchronization=True,
        )
        known[size] = ref(part)
    return Communicator(part, log=comms.log, number=next_number(part))


def _twin(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A second group of the same ranks, made once."""
    known = _twins.get(group)
    twin = None if known is None else known()
    if twin is None:
        twin = dist.new_group(
            dist.get_process_group_ranks(group),
            backend=dist.get_backend_config(group),
            use_local_synchronization=True,
        )
        _twins[group] = ref(twin)
    return twin
