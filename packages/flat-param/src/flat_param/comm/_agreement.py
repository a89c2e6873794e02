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
from ._trail import first_difference

P = TypeVar("P")


def describe(specs: Sequence[ParamSpec], settings: Mapping[str, object]) -> list[str]:
    """Return lines that must be equal on every rank, parameters first."""
    return [*map(_describe, specs), *[f"{name} {value}" for name, value in settings.items()]]


def _describe(spec: ParamSpec) -> str:
    frozen = "" if spec.requires_grad else ", frozen"
    is_usual = spec.stride == contiguous_stride(spec.shape)
    stride = "" if is_usual else f", of stride {spec.stride}"
    tied = f", tied to {', '.join(spec.aliases)}" if spec.aliases else ""
    return f"parameter '{spec.name}' {spec.shape} of {spec.dtype}{frozen}{stride}{tied}"


def agree(comms: Sequence[Communicator], plan: Callable[[], tuple[P, list[str]]]) -> P:
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
        reason = first_difference(_from_all(comms, (rank, description)), verb="has")
        raise CommError(
            f"flat_param.fully_shard: {reason}, but all ranks must shard the same model in the "
            "same way. Build it from the same settings on every rank."
        )
    return planned


def _from_all(comms: Sequence[Communicator], note: Any) -> list[Any]:
    notes = [note]
    for comm in comms:
        notes = [one for there in comm.share(notes) for one in there]
    return notes
