"""Ranks compare their sharding plans before any module is changed.

A rank with an error also takes part, so an error on one rank is raised on all. Ranks
compare digests, and send whole descriptions only if digests differ.
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
"""Names and values that must be the same on every rank, in order."""


def describe(specs: Sequence[ParamSpec], settings: Mapping[str, object]) -> Description:
    """Return the text that must be equal on every rank, parameters first."""
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
    """The digest of one rank's plan, or its error."""

    rank: int
    digest: str = ""
    refusal: str = ""


class Described(Protocol):
    """A plan that ranks can compare."""

    @property
    def description(self) -> Description:
        """Text that must be equal on every rank."""


P = TypeVar("P", bound=Described)


def agree(comms: Sequence[Communicator], plan: Callable[[], P]) -> P:
    """Plan on every rank, and return this rank's plan if all descriptions are equal. Collective."""
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
    """The first value that differs between two ranks; empty if none does."""
    here, there = dict(first), dict(other)
    for name in [*here, *there]:
        values = [side.get(name, "missing") for side in (here, there)]
        if values[0] != values[1]:
            return f"{name} is {values[0]} on rank {ranks[0]} and {values[1]} on rank {ranks[1]}"
    for name, swapped in zip(here, there, strict=True):
        if name != swapped:
            return f"{name} is before {swapped} on rank {ranks[0]} and after it on rank {ranks[1]}"
    return ""
