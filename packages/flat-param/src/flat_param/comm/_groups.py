"""The communicators of a device mesh, or of torch's default process group.

Note [Two communicators]
    Parameters are gathered in the order of forward and backward, and gradients are summed when they
    are ready. If a batch leaves a layer unused on one rank, the two orders interleave differently
    there. Gathers and sums therefore have separate process groups, each with a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        gather: ranks that hold the shards of one replica.
        reduce: the same ranks, for gradients. See Note [Two communicators].
        replicate: ranks that hold the same shard of other replicas.
        log: counts the collectives of all three.
    """

    gather: Communicator
    reduce: Communicator
    replicate: Communicator
    log: CommLog

    @property
    def world_size(self) -> int:
        """Number of ranks whose gradients are averaged."""
        return self.reduce.world_size * self.replicate.world_size

    @contextmanager
    def telling_others(self) -> Iterator[None]:
        """Send an error of the block to all ranks that share the unit. Not a collective."""
        try:
            yield
        except Exception as error:
            self.gather.refuse(str(error))
            self.replicate.refuse(str(error))
            raise

    def name(self, unit: str) -> None:
        """Set the name of the unit in messages."""
        for comm in (self.gather, self.reduce, self.replicate):
            comm.rename(unit)

    def share_change(self, change: str) -> None:
        """Wait until all ranks have made a change of dtype or device."""
        self.gather.share_change(change)
        self.replicate.share_change(change)


_Group = dist.ProcessGroup
# Weakly: torch keeps a group until it is destroyed, see Note [Threads of gloo] in _exit.py.
_derived: WeakKeyDictionary[_Group, dict[object, ReferenceType[_Group]]] = WeakKeyDictionary()


def derived_group(
    group: _Group, key: object, ranks: Sequence[int], *, backend: str | None = None
) -> _Group:
    """A process group of `ranks`, made once for `group` and `key`. Collective for `ranks`."""
    known = _derived.setdefault(group, {})
    found = known[key]() if key in known else None
    if found is None:
        found = cast(
            _Group,
            dist.new_group(
                list(ranks),
                backend=backend or dist.get_backend_config(group),
                use_local_synchronization=True,
            ),
        )
        known[key] = ref(found)
    return found


def make_comm_groups(mesh: DeviceMesh | None, *, log: CommLog) -> CommGroups:
    """The process groups of a unit. Collective: every rank of the world calls it."""
    shard, replicate = _groups(mesh)
    groups = (shard, shard and _twin(shard), replicate and _twin(replicate))
    to_gather, to_reduce, to_replicate = (
        Communicator(g, log=log, number=next_number(g)) for g in groups
    )
    return CommGroups(to_gather, to_reduce, to_replicate, log)


def meeting_comms(mesh: DeviceMesh | None) -> tuple[Communicator, ...]:
    """Return communicators of all ranks that shard together; their calls are not counted.

    Not a collective.
    """
    return tuple(Communicator(group, log=CommLog()) for group in _meeting_groups(mesh))


def _meeting_groups(mesh: DeviceMesh | None) -> list[_Group]:
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
    """Number of copies, and of ranks that divide each. Not a collective."""
    shard, replicate = _groups(mesh)
    replicas = 1 if replicate is None else dist.get_world_size(replicate)
    return replicas, 1 if shard is None else dist.get_world_size(shard)


def ranks_together(mesh: DeviceMesh | None) -> tuple[int, ...]:
    """Ranks that have a part or a copy of this rank's parameters. Not a collective."""
    groups = _groups(mesh)
    found = {rank for each in groups if each for rank in dist.get_process_group_ranks(each)}
    return tuple(sorted(found))


def _groups(
    mesh: DeviceMesh | None,
) -> tuple[_Group | None, _Group | None]:
    """The ranks that divide parameters, and the ranks that have the same part."""
    if mesh is None or mesh.ndim == 1:
        return _one_group(mesh), None
    if mesh.ndim != 2:
        raise StateError(
            f"flat_param.fully_shard: mesh has {mesh.ndim} axes, but parameters are sharded over "
            "one axis, or replicated over the first of two and sharded over the second. Pass "
            "part of it, such as mesh['shard']."
        )
    return None if mesh.size(1) == 1 else mesh.get_group(1), mesh.get_group(0)


def _one_group(mesh: DeviceMesh | None) -> _Group:
    if mesh is not None:
        return mesh.get_group()
    if not dist.is_available() or not dist.is_initialized():
        raise StateError(
            "flat_param.fully_shard: there is no process group, but parameters are sharded over "
            "one. Call torch.distributed.init_process_group, or use flat_param.flatten."
        )
    return cast(_Group, dist.group.WORLD)


def comm_of_part(comms: CommGroups, size: int) -> Communicator:
    """Return a communicator of `size` neighbouring ranks of a unit, including this one.

    Collective over these ranks in the first call.
    """
    group = cast(_Group, comms.gather.group)
    first = comms.gather.rank // size * size
    ranks = dist.get_process_group_ranks(group)[first : first + size]
    part = derived_group(group, size, ranks)
    return Communicator(part, log=comms.log, number=next_number(part))


def _twin(group: _Group) -> _Group:
    """Return a second process group of the same ranks."""
    return derived_group(group, "twin", dist.get_process_group_ranks(group))
