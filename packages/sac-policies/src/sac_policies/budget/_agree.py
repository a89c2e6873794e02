"""Collectives over the default process group, so that all ranks follow one plan.

Without a process group, they return the caller's values.
"""

from __future__ import annotations

import pickle
from typing import TypeVar

import torch
import torch.distributed as dist

from .._errors import BudgetError

T = TypeVar("T")


def from_first_rank(value: T) -> T:
    """Return the value that rank 0 passed. Collective."""
    return _from_all(value)[0]


def largest(value: int) -> int:
    """Return the largest value that any rank passed. Collective."""
    return max(_from_all(value))


def largest_each(values: list[int]) -> list[int]:
    """Return the largest value of any rank at each position. Collective."""
    return [max(each) for each in zip(*_from_all(values), strict=False)]


def check_equal(digest: str, *, what: str) -> None:
    """Raise on every rank unless all ranks passed the same digest. Collective.

    Raises:
        BudgetError: with the digest of each rank.
    """
    digests = _from_all(digest)
    if len(set(digests)) > 1:
        raise BudgetError(
            f"sac_policies.fit_: {what} digests {digests} differ between ranks, but one plan "
            "needs one sequence of operators. Give every rank the same model and batch shape."
        )


def _from_all(value: T) -> list[T]:
    """Return every rank's value; torch's `all_gather_object` needs numpy."""
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world == 1:
        return [value]
    device = None
    if dist.get_backend() != "gloo":
        device = torch.accelerator.current_accelerator(check_available=True)
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    size = torch.tensor([data.numel()], device=device)
    sizes = [torch.empty_like(size) for _ in range(world)]
    dist.all_gather(sizes, size)
    padded = data.new_zeros(max(int(each) for each in sizes))
    padded[: data.numel()] = data
    found = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(found, padded)
    texts = (bytes(each[: int(n)].tolist()) for each, n in zip(found, sizes, strict=True))
    return [pickle.loads(text) for text in texts]
