"""Ranks compare their sharding plans before any module is changed.

A rank with an error also takes part, so an error on one rank is raised on all. Ranks
compare digests, and send whole descriptions only if digests differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from .._errors import CommError
from ..layout._spec import ParamSpec, contiguous_stride
from ._comm import Communicator

Description = tuple[tuple[str, str], ...]
"""Names and values that must be the same on every rank, in order."""

P = TypeVar("P")


def describe(specs: Sequence[ParamSpec], settings: Mapping[str, object]) -> Description:
    """Return the text that must be equal on every rank, parameters first."""
    params = [(f"parameter '{spec.name}'", _describe_param(spec)) for spec in specs]
    return (*params, *[(name, str(value)) for name, value in settings.items()])


def _describe_param(spec: ParamSpec) -> str:
    frozen = "" if spec.requires_grad else ", frozen"
    is_usual = spec.stride == contiguous_stride(spec.shape)
    stride = "" if is_usual else f", of stride {spec.stride}"
    tied = f", tied to {', '.join(spec.aliases)}" if spec.aliases else ""
    return f"{spec.shape} of {spec.dtype}{frozen}{stride}{tied}"


def agree(comms: Sequence[Communicator], plan: Callable[[], tuple[P, Description]]) -> P:
    """Plan on every rank, and return this rank's plan if all descriptions are equal. Collective."""
    rank = dist.get_rank()
    try:
        planned, description = plan()
    except Exception as error:
        _from_all(comms, (rank, "", f"{type(error).__name__}: {error}"))
        raise
    digest = hashlib.sha256(repr(description).encode()).hexdigest()
    notes = _from_all(comms, (rank, digest, ""))
    for other, _, refusal in notes:
        if refusal:
            raise CommError(
                f"flat_param.fully_shard: rank {other} cannot shard its module, but all ranks must "
                f"shard the same one. Correct the error of that rank: {refusal}"
            )
    if any(theirs != digest for _, theirs, _ in notes):
        (first, here), *others = _from_all(comms, (rank, description))
        reasons = (_difference(here, there, ranks=(first, other)) for other, there in others)
        raise CommError(
            f"flat_param.fully_shard: {next(filter(None, reasons))}, but all ranks must shard the "
            "same model in the same way. Build it from the same settings on every rank."
        )
    return planned


def _from_all(comms: Sequence[Communicator], note: Any) -> list[Any]:
    notes = [note]
    for comm in comms:
        notes = [one for there in comm.share(notes) for one in there]
    return notes


def _difference(first: Description, other: Description, *, ranks: tuple[int, int]) -> str:
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
