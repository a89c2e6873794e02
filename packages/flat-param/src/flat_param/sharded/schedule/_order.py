"""One small collective at the end of a backward.

Ranks agree on which parameters any of them has used, and compare the order of their units. The
order is a checksum and its complement, four bytes each: the maximum over ranks of each byte is
again a checksum and its complement only if all ranks sent the same.

- All-gathers and reduce-scatters are compared by the ranks that shard the parameters, collectives
  of replicas by the ranks that hold replicas.
- Reading the result would synchronize with the device. So the word of the previous step is read,
  which is ready, and computation does not wait for the one of this step.
- During graph capture nothing is compared. A replay runs no Python, so its order of units and its
  used parameters are those of the capture.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from ..._errors import CommError
from ...comm._comm import Communicator
from ...comm._groups import CommGroups
from ...comm._streams import SideWork, is_capturing
from ...comm._trail import ORDER_BYTES, Trail, Unread, first_difference
from ..unit._unit import Unit

_COMPLEMENT = bytes(range(255, -1, -1))


class Agreement:
    """The agreement of units whose gradients are reduced over the same ranks. Collective.

    It begins before the last reductions are waited for, in process groups that no reduction uses.

    Raises:
        CommError: ranks have run units in another order, or a parameter was not used and a graph
            is being captured.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._parts = [part for unit in units for part in unit.trained]
        self._used = [flag for part in self._parts for flag in part.used]
        self._said: tuple[Tensor, SideWork | None] | None = None
        device = units[0].parts[0].device
        if units[0].comms.world_size == 1:
            return
        if device.type == "cpu" or not is_capturing(device):
            self._send(units[0].comms, device)
        elif not all(self._used):
            raise CommError(
                f"flat_param.fully_shard: {self._used.count(False)} parameters got no gradient "
                "while a graph is being captured, but whether another rank has one is read on the "
                "host, which may not wait for the device then. Capture a step that uses every "
                "parameter, or freeze those that it does not."
            )

    def _send(self, comms: CommGroups, device: torch.device) -> None:
        spread, copied = _trails(comms.gather, comms.reduce), _trails(comms.replicate)
        values = [*_word(spread), *self._used, *_word(copied)]
        on_host = torch.tensor(values, dtype=torch.uint8, pin_memory=device.type != "cpu")
        copy = None if device.type == "cpu" else SideWork(device, "word", waits=False)
        with copy or nullcontext():  # computation does not wait for the word
            said = on_host.to(device, non_blocking=True)
            largest = partial(Communicator.all_reduce, op=dist.ReduceOp.MAX, of_unit=False)
            largest(comms.gather, said[:-ORDER_BYTES]).wait()
            largest(comms.copies, said[ORDER_BYTES:]).wait()
            words = torch.cat([said[:ORDER_BYTES], said[-ORDER_BYTES:]])
            if copy is not None:
                near = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
                words = near.copy_(words, non_blocking=True)
        labels = [[label for trail in each for label in trail.recent] for each in (spread, copied)]
        for trail in (*spread, *copied):
            trail.checksum = 0
            trail.recent.clear()
        if copy is None:
            _check(words, labels, comms)
        else:
            last = (spread or copied)[-1]
            previous, last.unread = last.unread, Unread(words, said, copy, labels)
            if previous is not None:
                previous.copy.synchronize()
                _check(previous.words, previous.labels, comms)
        self._said = said, copy

    @torch.no_grad()
    def assign_grads(self) -> None:
        """Set `.grad` of all parameters that some rank has used. Not a collective."""
        agreed = self._used
        if self._said is not None and not all(agreed):  # else no reading is needed
            said, copy = self._said
            if copy is not None:
                copy.wait()
            agreed = [bool(flag) for flag in said[ORDER_BYTES:-ORDER_BYTES].tolist()]
        flags = iter(agreed)
        for part in self._parts:
            part.assign_grads(list(islice(flags, len(part.used))))


def agree(reduced: Iterable[Unit]) -> list[Agreement]:
    """Begin to agree on the parameters of units that some rank has used. Collective."""
    groups: dict[tuple[object, object], list[Unit]] = {}
    for unit in reduced:
        key = (unit.comms.reduce.group, unit.comms.replicate.group)
        groups.setdefault(key, []).append(unit)
    return [Agreement(units) for units in groups.values()]


def _trails(*comms: Communicator) -> list[Trail]:
    return [comm.trail for comm in comms if comm.trail is not None]


def _word(trails: list[Trail]) -> bytes:
    """The checksum of the order, and its complement."""
    sums = [trail.checksum for trail in trails]
    word = zlib.crc32(repr(sums).encode()).to_bytes(4, "big")
    return word + word.translate(_COMPLEMENT)


def _check(words: Tensor, labels: list[list[str]], comms: CommGroups) -> None:
    """Raise if ranks differ."""
    values = bytes(words.tolist())
    for at, comm in enumerate((comms.gather, comms.copies)):
        word = values[at * ORDER_BYTES : (at + 1) * ORDER_BYTES]
        if word[4:] != word[:4].translate(_COMPLEMENT):
            found = comm.share((dist.get_rank(), labels[at]))
            reason = (
                first_difference(found, verb="did")
                or "ranks sent other numbers of bytes, as after a one-sided .to()"
            )
            raise CommError(
                f"flat_param.fully_shard: {reason}, but all ranks must run the same units in the "
                "same order. No gradient of this step was handed out; make the order the same on "
                "every rank and restart from the last checkpoint."
            )
