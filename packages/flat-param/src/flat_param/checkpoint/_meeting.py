"""Where the ranks of one save meet: through the store, in collectives, or each alone.

Where torch does not hand out the process group's store, the ranks meet in collectives instead.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import torch.distributed as dist

from .._errors import CommError
from .._torch_compat import default_store
from ..comm._comm import Communicator
from ..comm._peer_messages import MessageStore
from ._store_meeting import Notes, StoreMeeting


class Meeting(Protocol):
    """How the ranks of one save meet; for the rules see `_store_meeting`."""

    def join(
        self,
        note: dict[str, Any],
        *,
        behind: Callable[[Notes], set[int]],
        prepare: Callable[[], None],
    ) -> str:
        """Wait until all ranks are there. Every rank of the unit calls it.

        Args:
            note: what the leader has to know of this rank.
            behind: from all notes, the ranks to be dismissed (Rule 2); called where the notes are.
            prepare: called on the leader when all are there, before any of them goes on.

        Returns:
            The attempt; empty where this call is dismissed.
        """

    def settle(self, report: dict[str, Any], decide: Callable[[Notes], str]) -> str:
        """Wait until all ranks have reported and the leader has decided (Rule 4).

        Args:
            report: how it went on this rank.
            decide: called on the leader; what is wrong, or nothing.
        """

    def leave(self) -> None:
        """Take part no longer; after `settle`, or instead of it."""


@dataclass
class CollectiveMeeting:
    """In collectives, or alone. An error of the leader is told to all, and raised by all.

    Args:
        share: gives every rank's value, by rank. Collective.
        member: this rank's position among them; the first leads.
    """

    share: Callable[[Any], list[Any]]
    member: int

    def join(
        self,
        note: dict[str, Any],
        *,
        behind: Callable[[Notes], set[int]],
        prepare: Callable[[], None],
    ) -> str:
        """As the protocol has it, but nobody is dismissed: the others wait in a collective.

        Raises:
            CommError: some are behind; on every rank, which have the same notes.
        """
        if late := behind(self.share(note)):
            raise CommError(
                f"flat_param.save_sharded: ranks at {sorted(late)} of the group are at an earlier "
                "step than the others, but a checkpoint is of one step. Call it on all ranks "
                "after the same step."
            )
        return self._led(lambda: self._attempt(prepare))

    def settle(self, report: dict[str, Any], decide: Callable[[Notes], str]) -> str:
        """As the protocol has it."""
        reports = self.share(report)
        return self._led(lambda: decide(reports))

    def leave(self) -> None:
        """Nobody waits for a rank that is not in a collective."""

    @staticmethod
    def _attempt(prepare: Callable[[], None]) -> str:
        prepare()
        return uuid.uuid4().hex[:12]

    def _led(self, call: Callable[[], str]) -> str:
        """What the leader's call gives. Collective."""
        given, error = "", None
        if self.member == 0:
            try:
                given = call()
            except Exception as raised:
                error = raised
        first, told = self.share((given, None if error is None else str(error)))[0]
        if error is not None:
            raise error
        if told is not None:
            raise CommError(
                f"flat_param.save_sharded: the first rank has left the save ({told}), but it leads "
                "the save. Call save_sharded again on all ranks."
            )
        return str(first)


def meeting_of(
    comms: Sequence[Communicator], timeout_s: float | None
) -> StoreMeeting | CollectiveMeeting:
    """Where all ranks of a mesh meet. Not a collective where there is a store.

    Args:
        comms: of the mesh's axes, the one along which ranks are numbered first.
        timeout_s: how long to wait for others; by default as long as the store does.

    Raises:
        CommError: the ranks of a first row have not come in time.
    """
    axes = [comm for comm in comms if comm.world_size > 1]
    member = number_over(axes)
    if not axes:
        return CollectiveMeeting(lambda value: [value], member)
    store = default_store()
    if store is None:
        return CollectiveMeeting(lambda value: share_over(axes, value), member)
    if timeout_s is None:
        timeout_s = store.timeout.total_seconds()
    sizes = [comm.world_size for comm in axes]
    row = _ranks(axes[0])
    for position, comm in enumerate(axes[1:], 1):
        row = _first_row(store, row, comm, _times(sizes[:position]), member, timeout_s)
    others = list(product(*map(range, reversed(sizes))))[len(row) :]
    names = [*row, *(f"at {each} of the mesh" for each in others)]
    place = f"{_joined(row)}/{_times(sizes[1:])}"
    return StoreMeeting(store, place, names, member, timeout_s)


def _first_row(
    store: MessageStore,
    row: list[str],
    comm: Communicator,
    sizes: str,
    member: int,
    timeout_s: float,
) -> list[str]:
    """What the first rank along one more axis has for a row; it tells the others."""
    found = StoreMeeting(store, "rows/" + _joined(_ranks(comm)), row, member, timeout_s)
    if comm.rank == 0:
        found._set(sizes, row)
        return row
    found._wait(lambda: found._get(sizes) is not None, lambda: {0})
    first: list[str] = found._get(sizes)
    return first


def number_over(axes: Sequence[Communicator]) -> int:
    """This rank's number in a mesh, of which the first axis runs fastest."""
    number, size = 0, 1
    for comm in axes:
        number, size = number + size * comm.rank, size * comm.world_size
    return number


def _times(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _ranks(comm: Communicator) -> list[str]:
    ranks = (dist.get_rank(),) if comm.board is None else comm.board.ranks
    return [str(rank) for rank in ranks]


def _joined(ranks: Sequence[str]) -> str:
    """A short name for ranks that may be thousands."""
    return hashlib.sha256("-".join(ranks).encode()).hexdigest()[:16]


def share_over(comms: Sequence[Communicator], value: Any) -> list[Any]:
    """Every rank's value, over communicators that lead to all of them. Collective."""
    values = [value]
    for comm in comms:
        values = [one for there in comm.share(values) for one in there]
    return values
