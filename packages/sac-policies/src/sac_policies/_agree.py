"""Edge: calls torch.distributed, so that all ranks follow one plan.

Every function is collective over the default group where there is one, and does nothing
otherwise. A rank that does not call makes the others wait.
"""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

from ._errors import BudgetError

T = TypeVar("T")


def world_size() -> int:
    """Ranks that must agree; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def from_first_rank(value: T) -> T:
    """Return the value that rank 0 passed. Collective.

    Example:
        >>> from_first_rank("plan")
        'plan'
    """
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def largest(value: int) -> int:
    """Return the largest value that any rank passed. Collective.

    Example:
        >>> largest(3)
        3
    """
    return max(_from_all(value))


def check_equal(digest: str, *, what: str) -> None:
    """Raise on every rank where not all ranks passed the same digest. Collective.

    Raises:
        BudgetError: with the digest of each rank.

    Example:
        >>> check_equal("1d0c", what="trace")
    """
    digests = _from_all(digest)
    if len(set(digests)) > 1:
        raise BudgetError(
            f"sac_policies.fit: {what} digests {digests} differ between ranks, but one plan "
            "needs one sequence of operators. Give every rank the same model and batch shape."
        )


def _from_all(value: T) -> list[T]:
    if world_size() == 1:
        return [value]
    found: list[T] = [value] * world_size()
    dist.all_gather_object(found, value)
    return found
