"""One small collective at the end of a backward.

Ranks agree on which parameters any of them has used, and compare the order of their units. The
order is a checksum and its complement, four bytes each: the maximum over ranks of each byte is
again a checksum and its complement only if all ranks sent the same.

- All-gathers and reduce-scatters are compared by the ranks that shard the parameters, collectives
  of replicas by the ranks that hold replicas.
- Reading the result would synchronize with the device. So the word of the previous step is read,
  which is ready.
- During graph capture nothing is compared. A replay runs no Python, so its order of units and its
  used parameters are those of the capture.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import CommError
from ..comm._capturing import is_capturing
from ..comm._comm import Communicator
from ..comm._groups import CommGroups
from ..comm._trail import ORDER_BYTES, Trail, first_difference
from ._unit_params import UnitParams


def agree_on_step(used: list[bool], unit: UnitParams) -> list[bool]:
    """Compare the order of units, and find parameters that some rank has used. Collective.

    Raises:
        CommError: ranks have run units in another order, or a parameter was not used and a graph
            is being captured.
    """
    comms = unit.comms
    if comms.world_size == 1:
        return used
    device = unit.parts[0].device
    if is_capturing(device):
        return _all_used(used)
    spread, copied = _trails(comms.gather, comms.reduce), _trails(comms.replicate)
    values = [*_word(spread), *used, *_word(copied)]
    on_host = torch.tensor(values, dtype=torch.uint8, pin_memory=device.type != "cpu")
    said = on_host.to(device, non_blocking=True)
    largest = partial(Communicator.all_reduce, op=dist.ReduceOp.MAX, of_unit=False)
    largest(comms.reduce, said[:-ORDER_BYTES]).wait()
    largest(comms.replicate, said[ORDER_BYTES:]).wait()
    _check(said, comms)
    # If all are True, no reading is needed.
    return used if all(used) else [bool(flag) for flag in said[ORDER_BYTES:-ORDER_BYTES].tolist()]


def _all_used(used: list[bool]) -> list[bool]:
    if not all(used):
        raise CommError(
            f"flat_param.fully_shard: {used.count(False)} parameters got no gradient while a graph "
            "is being captured, but whether another rank has one is read on the host, which may "
            "not wait for the device then. Capture a step that uses every parameter, or freeze "
            "those that it does not."
        )
    return used


def publish(reduced: list[UnitParams]) -> None:
    """Set `.grad` of all parameters that some rank has used. Collective."""
    groups: dict[tuple[object, object], list[UnitParams]] = {}
    for unit in reduced:
        key = (unit.comms.reduce.group, unit.comms.replicate.group)
        groups.setdefault(key, []).append(unit)
    for units in groups.values():
        _publish_together(units)


def _publish_together(units: list[UnitParams]) -> None:
    """Set `.grad` for units that share process groups. Collective."""
    all_grads = [grads for unit in units for grads in unit.grads]
    with units[0].comms.telling_others():
        for grads in all_grads:
            grads.check_hooks()
    agreed = agree_on_step([flag for grads in all_grads for flag in grads.used], units[0])
    for grads in all_grads:
        mine, agreed = agreed[: len(grads.used)], agreed[len(grads.used) :]
        grads.assign_grads(mine)


def _trails(*comms: Communicator) -> list[Trail]:
    return [comm.trail for comm in comms if comm.trail is not None]


def _word(trails: list[Trail]) -> bytes:
    """The checksum of the order, and its complement."""
    sums = [trail.checksum for trail in trails]
    word = zlib.crc32(repr(sums).encode()).to_bytes(4, "big")
    return word + word.translate(_COMPLEMENT)


def _agreed(word: bytes) -> bool:
    return word[4:] == word[:4].translate(_COMPLEMENT)


@dataclass(frozen=True)
class _Said:
    """A result of the collective that is not read yet."""

    spread: Tensor
    copied: Tensor
    there: torch.Event | None
    labels: tuple[list[str], list[str]]

    @classmethod
    def of(cls, said: Tensor, labels: tuple[list[str], list[str]]) -> _Said:
        words = torch.cat([said[:ORDER_BYTES], said[-ORDER_BYTES:]])
        there = None
        if words.device.type != "cpu":
            there, on_device = torch.Event(words.device), words
            words = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
            words.copy_(on_device, non_blocking=True)
            there.record()
        return cls(words[:ORDER_BYTES], words[ORDER_BYTES:], there, labels)


_COMPLEMENT = bytes(range(255, -1, -1))
_unread: WeakKeyDictionary[Trail, _Said] = WeakKeyDictionary()


def _check(said: Tensor, comms: CommGroups) -> None:
    """Raise if ranks differ; on a device, the previous step's word is compared."""
    spread, copied = _trails(comms.gather, comms.reduce), _trails(comms.replicate)
    labels = ([label for t in spread for label in t.recent], [x for t in copied for x in t.recent])
    for trail in (*spread, *copied):
        trail.compared()
    now = _Said.of(said, labels)
    first = (spread or copied)[-1]
    due = now if now.there is None else _unread.get(first)
    if due is not now:
        _unread[first] = now
    if due is None:
        return
    if due.there is not None:
        due.there.synchronize()
    if not _agreed(bytes(due.spread.tolist())):
        _refuse(comms, comms.reduce, due.labels[0])
    if not _agreed(bytes(due.copied.tolist())):
        _refuse(comms, comms.replicate, due.labels[1])


def _refuse(comms: CommGroups, comm: Communicator, labels: list[str]) -> None:
    """Raise an error that names the first difference. Collective."""
    found = comm.share((dist.get_rank(), labels))
    with comms.telling_others():
        raise CommError(
            f"flat_param.fully_shard: {first_difference(found) or 'ranks differ'}, but all ranks "
            "must run the same units in the same order. No gradient of this step was handed out; "
            "make the order the same on every rank and restart from the last checkpoint."
        )
