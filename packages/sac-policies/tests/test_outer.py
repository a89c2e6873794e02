"""What a region keeps and did not make: read as it is by its node, as it was by a replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sac_policies.engines._guards import noting
from sac_policies.engines.recipe._recipes import Outer, keep, reader
from sac_policies.engines.recipe._shared_values import replays

READ = reader(None)


def _outer(tensor: torch.Tensor) -> Outer:
    return Outer(keep(tensor, tensor.grad_fn), tensor, READ)


def _in_replay(outer: Outer) -> torch.Tensor:
    replays.depth += 1
    try:
        return outer.read()
    finally:
        replays.depth -= 1


def test_what_nobody_protects_is_read_as_it_is() -> None:
    """There is no copy."""
    tensor = torch.ones(3)
    outer = _outer(tensor)
    tensor.data.fill_(2)
    assert _in_replay(outer) is tensor
    assert outer.copy is None


def test_first_copy_stays() -> None:
    """A second recipe that reads the tensor is not to take what was written since."""
    tensor = torch.ones(2)
    outer = _outer(tensor)
    outer.protect()
    tensor.data.fill_(7)
    outer.protect()
    assert _in_replay(outer).tolist() == [1, 1]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(8.0).view(2, 4).t(),
        torch.ones(2, dtype=torch.complex64),
        torch.arange(3),
    ],
    ids=["plain", "strided", "complex", "integers"],
)
def test_small_one_is_read_as_it_was(tensor: torch.Tensor) -> None:
    """A replay has the copy, its own node the tensor."""
    outer = _outer(tensor)
    outer.protect()
    before = tensor.clone()
    tensor.data.add_(1)
    assert outer.read() is tensor
    found = _in_replay(outer)
    assert torch.equal(found, before)
    assert found.stride() == tensor.stride()


def test_copies_are_counted() -> None:
    """A report counts what is still alive."""
    outer = _outer(torch.ones(3))
    with noting() as notes:
        outer.protect()
    assert len(notes) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.untyped_storage().resize_(0),
        lambda tensor: setattr(tensor, "data", torch.zeros(2)),
        lambda tensor: setattr(tensor, "data", torch.zeros(6, 6).t()),
        lambda tensor: setattr(tensor, "data", tensor.view(-1)),
        lambda tensor: setattr(tensor, "data", tensor.view(torch.int32)),
    ],
    ids=["freed", "smaller", "strided", "flat", "integers"],
)
def test_memory_that_is_another_is_not_read(change: Any) -> None:
    """As where parameters are freed between forward and backward."""
    tensor = torch.arange(36.0).view(6, 6)
    outer = _outer(tensor)
    outer.protect()
    before = tensor.clone()
    change(tensor)
    found = _in_replay(outer)
    assert torch.equal(found, before)
    assert found.dtype == before.dtype
