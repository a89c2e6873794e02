"""The ranks that save and load a sharded module together."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from .._errors import CheckpointError, CommError, StateError
from ..buffers._dtensors import place_of_dtensor
from ..comm._comm import CommLog, Communicator
from ..comm._groups import derived_group
from ..sharded.unit._by_hand import units_below


class World:
    """All ranks that have a part or a copy of a module's parameters.

    Args:
        module: sharded, or with sharded modules inside.
        function: the public function, for messages.
        plain: accept a module that is not sharded, as a world of this rank alone.
    """

    def __init__(self, module: nn.Module, function: str, *, plain: bool = False) -> None:
        is_sharded = next(units_below(module), None) is not None
        if not is_sharded and not plain:
            raise StateError(
                f"flat_param.{function}: {type(module).__name__} is not sharded. Call fully_shard "
                "first."
            )
        self.function = function
        self.ranks = _ranks_of(module) if is_sharded else (0,)
        group = self._group_for("caller") if is_sharded else None
        self.comm = Communicator(group, log=CommLog())
        self.is_first = self.comm.rank == 0

    def for_thread(self) -> World:
        """The same ranks with a separate group, for another thread. Collective."""
        other = copy.copy(self)
        other.comm = Communicator(self._group_for("thread"), log=CommLog())
        return other

    def _group_for(self, user: str) -> dist.ProcessGroup:
        """A gloo group, so that training, saves and an asynchronous save do not interleave.

        Collective at the first call.
        """
        world = dist.group.WORLD
        assert world is not None, "a sharded module has process groups"
        try:
            return derived_group(world, (user, self.ranks), self.ranks, backend="gloo")
        except RuntimeError as error:
            raise self._not_called(error) from error

    def _not_called(self, error: Exception) -> CheckpointError:
        first = str(error).splitlines()[0]
        return CheckpointError(
            f"flat_param.{self.function}: not all of ranks {', '.join(map(str, self.ranks))} have "
            "called it within the timeout of the process group, but it exchanges data between all "
            "of them. Call it on every rank, not under 'if rank == 0'; full_state_dict has "
            f"rank0_only=True for results on one rank. Or a rank has ended. ({first})"
        )

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Run a block on all ranks; an error on one of them is raised on all. Collective."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.agree(error)

    def agree(self, error: Exception | None, note: str = "") -> set[str]:
        """Return the notes of all ranks; raise on all if there is an error on one. Collective."""
        try:
            told = self.comm.share((None if error is None else str(error), note))
        except CommError as raised:
            raise self._not_called(raised) from (error or raised)
        if error is not None:
            raise error
        for rank, (text, _) in zip(self.ranks, told, strict=True):
            if text is not None:
                raise CheckpointError(
                    f"flat_param.{self.function}: rank {rank} has failed, so nothing was done on "
                    f"any rank. Its error: {text}"
                )
        return {each for _, each in told}


def _ranks_of(module: nn.Module) -> tuple[int, ...]:
    groups = list(dict.fromkeys(_groups_of(module)))
    known = {dist.get_rank(), *(r for each in groups for r in dist.get_process_group_ranks(each))}
    if len(groups) > 1 and len(known) < dist.get_world_size():
        for group in groups * len(groups):  # collect ranks along all axes
            known |= set().union(*Communicator(group, log=CommLog()).share(known))
    return tuple(sorted(known))


def _groups_of(module: nn.Module) -> Iterator[dist.ProcessGroup]:
    places = [place_of_dtensor(each) for each in (*module.parameters(), *module.buffers())]
    for unit in units_below(module):
        for comm in (unit.comms.gather, unit.comms.replicate):
            if comm.group is not None:
                yield comm.group
        places += [piece.place for part in unit.parts for piece in part.pieces]
    for mesh in dict.fromkeys(place.mesh for place in places if place is not None):
        for axis in range(mesh.ndim):
            yield mesh.get_group(axis)
