"""Saves a sharded module and its optimizer, each rank its part, without a collective.

The result is in torch.distributed.checkpoint's format. Any number of ranks loads it, and so does
FSDP2.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .._errors import CheckpointError, CommError
from ..dcp._checkpoint import commit, remove_leftovers, remove_part, write_part
from ..dcp._stored import Origin
from ._meeting import CollectiveMeeting, Meeting, meeting_of
from ._one_step import behind
from ._one_world import OneWorld, one_world
from ._rank_part import RankPart
from ._store_meeting import Notes
from ._writer import start, wait_for_last


def save_sharded(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    step: int | None = None,
    timeout_s: float | None = None,
) -> bool:
    """Write a checkpoint, each rank its part. Every rank must call it; it makes no collective call.

    Ranks wait for each other through the process group's store: until all are there, and until
    all parts are on the disk. Until then the previous contents of `path` stay intact; the new
    checkpoint replaces them at once. An error on one rank is an error on all, and all may try
    again. One
    job at a time can save to a path.

    Args:
        module: sharded.
        path: a folder that all ranks reach.
        optimizer: of the module.
        step: which step the state is of; ranks save together only at the same one. By default,
            they compare how often their parameters were written to in place.
        timeout_s: how long to wait for the other ranks; by default the process group's timeout.

    Returns:
        Whether `path` holds this state now. False only on a rank that was alone: the others have
        called it at a later step, and wait for its next call.

    Raises:
        CheckpointError: on some rank, the part cannot be written; or ranks do not save one model.
        CommError: a rank has not called it in time, or has died during it.
        StateError: the module is not sharded, or not in one way.
    """
    return _save_of(module, Path(path), optimizer, step, timeout_s).carry_out()


def async_save_sharded(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    step: int | None = None,
    timeout_s: float | None = None,
) -> Future[bool]:
    """Write a checkpoint as `save_sharded` does, in a thread, while training goes on.

    Every rank must call it. It copies this rank's part to host memory and returns; what happens
    to the module afterwards is not in the checkpoint. Ranks meet, write and commit in the thread.
    A process has one save under way: the next one, asynchronous or not, waits for it. The
    interpreter does not end before it. Memory: this rank's part, and its largest tensor.

    Args:
        module: sharded.
        path: a folder that all ranks reach.
        optimizer: of the module.
        step: as in `save_sharded`.
        timeout_s: as in `save_sharded`.

    Returns:
        A future for what `save_sharded` returns or raises. If it has failed and its result was
        never asked for, the next save raises its error on all ranks and saves nothing.

    Raises:
        CommError: the ranks have no store to meet in; or, of a mesh, the first copy's are late.
        StateError: the module is not sharded, or not in one way.
    """
    save = _save_of(module, Path(path), optimizer, step, timeout_s, snapshot=True)
    alone = all(comm.world_size == 1 for comm in save.world.axes)
    if isinstance(save.meeting, CollectiveMeeting) and not alone:
        raise CommError(
            "flat_param.async_save_sharded: torch gives no access to the process group's store, "
            "but ranks must meet there while training runs its collectives. Call save_sharded."
        )
    return start(save.carry_out, str(path))


@dataclass(frozen=True)
class _Save:
    """A save that nothing has been written of.

    Args:
        folder: of the checkpoint.
        part: what this rank is to save, or why it cannot.
        world: the ranks that save together.
        meeting: of all of them.
    """

    folder: Path
    part: RankPart
    world: OneWorld
    meeting: Meeting

    def carry_out(self) -> bool:
        """Meet, write, and commit; see `save_sharded`."""
        heard: Notes = []
        try:
            attempt = self.meeting.join(
                self.part.note,
                behind=lambda notes: behind(_heard(notes, heard)),
                prepare=lambda: remove_leftovers(self.folder),
            )
            if not attempt:
                return False
            origin = self._origin(attempt)
            report = _write(self.folder, self.part, origin) if self.world.saves else {}
            diagnosis = self.meeting.settle(
                report,
                lambda reports: _commit(self.folder, replace(origin, rank=None), heard, reports),
            )
        finally:
            self.meeting.leave()
            self.part.tensor_slices.clear()  # an error would keep a snapshot alive
        if diagnosis and self.world.saves:
            remove_part(self.folder, origin)
        if self.part.error is not None:
            raise self.part.error
        if diagnosis:
            raise CheckpointError(diagnosis)
        return True

    def _origin(self, attempt: str) -> Origin:
        world = self.world
        return Origin(attempt, world.parts, world.part, tuple(self.part.segments))


def _save_of(
    module: nn.Module,
    folder: Path,
    optimizer: Optimizer | None,
    step: int | None,
    timeout_s: float | None,
    *,
    snapshot: bool = False,
) -> _Save:
    world = one_world(module)
    meeting = meeting_of(world.axes, timeout_s)
    part = RankPart()
    try:
        wait_for_last()
        part.fill(module, optimizer, folder, step)
        if snapshot and world.saves:
            part.take_snapshot()
    except Exception as error:  # the others must hear of it
        part.error = error
    return _Save(folder, part, world, meeting)


def _heard(notes: Notes, heard: Notes) -> Notes:
    heard[:] = notes
    return notes


def _write(folder: Path, part: RankPart, origin: Origin) -> dict[str, Any]:
    """Write this rank's part; what to tell the others of it."""
    try:
        if part.error is None:
            return {"digest": write_part(folder, part.tensor_slices, part.values, origin)}
    except CheckpointError as error:
        part.error = error
    return {"error": str(part.error)}


def _commit(folder: Path, whole_save: Origin, heard: Notes, reports: Notes) -> str:
    """On the rank that leads: make the parts the checkpoint. What is wrong, or nothing."""
    for rank, report in enumerate(reports):
        if "error" in report:
            return (
                f"flat_param.save_sharded: part {rank} of {whole_save.world_size} cannot be saved, "
                f"but a checkpoint has all. Correct the error of its rank: {report['error']}"
            )
    for thing in ("path", "model", "step"):
        told = [note.get(thing) for note in heard]
        if any(each != told[0] for each in told):
            other = next(each for each in told if each != told[0])
            return (
                f"flat_param.save_sharded: the {thing} is {told[0]} on the first rank and {other} "
                "on another, but ranks must save one model to one path. Call it the same way on "
                "all ranks."
            )
    try:
        commit(
            folder, whole_save, [reports[rank]["digest"] for rank in range(whole_save.world_size)]
        )
    except CheckpointError as error:
        return str(error)
    return ""
