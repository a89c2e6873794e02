"""Ranks agree on what they shard before the module is changed or its parameters travel.

Rule 1: every rank takes part, also one that has found a mistake of its own. So an error on one rank
        is an error on all, and none of them waits for a collective that never comes.
Rule 2: ranks compare digests. Only where these differ do whole descriptions travel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from .._errors import CommError
from ..layout._spec import ParamSpec
from ._comm import Communicator

Description = tuple[tuple[str, str], ...]
"""What a unit is made of, in order: pairs of a thing and what it is."""


def describe(specs: Sequence[ParamSpec], settings: Mapping[str, object]) -> Description:
    """Everything that ranks must have in common, parameters first.

    Example:
        >>> import torch
        >>> describe([ParamSpec("w", (3, 2), torch.float32)], {"boundary": "row"})
        (("parameter 'w'", '(3, 2) of torch.float32'), ('boundary', 'row'))
    """
    params = ((f"parameter '{spec.name}'", _describe_param(spec)) for spec in specs)
    return (*params, *((name, str(value)) for name, value in settings.items()))


def _describe_param(spec: ParamSpec) -> str:
    unusual = [
        "" if spec.requires_grad else ", frozen",
        "" if spec == _row_major(spec) else f", of stride {spec.stride}",
        f", tied to {', '.join(spec.aliases)}" if spec.aliases else "",
    ]
    return f"{spec.shape} of {spec.dtype}{''.join(unusual)}"


def _row_major(spec: ParamSpec) -> ParamSpec:
    return ParamSpec(
        spec.name,
        spec.shape,
        spec.dtype,
        requires_grad=spec.requires_grad,
        aliases=spec.aliases,
    )


@dataclass(frozen=True)
class Note:
    """What one rank tells the others: what it plans, or why it cannot."""

    rank: int
    digest: str = ""
    refusal: str = ""


class Described(Protocol):
    """A plan that ranks can compare."""

    @property
    def description(self) -> Description:
        """What every rank's plan must say."""


P = TypeVar("P", bound=Described)


def agree(comms: Sequence[Communicator], plan: Callable[[], P]) -> P:
    """Plan on every rank, and return this rank's plan if all say the same. Collective.

    Args:
        comms: lead from every rank to every other, one after the other.
        plan: changes nothing; raises what is wrong on this rank.

    Raises:
        CommError: plans differ, or another rank has none.
        Exception: what `plan` raised on this rank.
    """
    try:
        planned = plan()
    except Exception as error:
        _from_all(comms, Note(dist.get_rank(), refusal=f"{type(error).__name__}: {error}"))
        raise
    note = Note(dist.get_rank(), digest=_digest(planned.description))
    notes = _from_all(comms, note)
    _refuse_without(notes)
    if any(other.digest != note.digest for other in notes):
        _refuse_first_difference(_from_all(comms, (note.rank, planned.description)))
    return planned


def _refuse_without(notes: Sequence[Note]) -> None:
    for note in notes:
        if note.refusal:
            raise CommError(
                f"flat_param.fully_shard: rank {note.rank} cannot shard its module, but all ranks "
                f"must shard the same one. Correct the error of that rank: {note.refusal}"
            )


def _from_all(comms: Sequence[Communicator], note: Any) -> list[Any]:
    notes = [note]
    for comm in comms:
        notes = [one for there in comm.share(notes) for one in there]
    return notes


def _digest(description: Description) -> str:
    return hashlib.sha256(repr(description).encode()).hexdigest()


def _refuse_first_difference(found: Sequence[tuple[int, Description]]) -> None:
    (first, reference), *others = found
    for rank, description in others:
        reason = difference(reference, description, ranks=(first, rank))
        if reason:
            raise CommError(
                f"flat_param.fully_shard: {reason}, but all ranks must shard the same model in the "
                "same way. Build it from the same settings on every rank."
            )


def difference(first: Description, other: Description, *, ranks: tuple[int, int]) -> str:
    """The first thing in which two ranks differ, or nothing.

    Example:
        >>> difference((("boundary", "row"),), (("boundary", "tensor"),), ranks=(0, 1))
        'boundary is row on rank 0 and tensor on rank 1'
    """
    here, there = dict(first), dict(other)
    for name in [*here, *there]:
        values = [side.get(name, "missing") for side in (here, there)]
        if values[0] != values[1]:
            return f"{name} is {values[0]} on rank {ranks[0]} and {values[1]} on rank {ranks[1]}"
    for name, swapped in zip(here, there, strict=True):
        if name != swapped:
            return f"{name} is before {swapped} on rank {ranks[0]} and after it on rank {ranks[1]}"
    return ""
