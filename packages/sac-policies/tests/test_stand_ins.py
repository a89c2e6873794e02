"""What is held in place of a tensor: made when it is read, and refused where that was changed."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sac_policies.engines.recipe._stand_ins import StandIn, WatchedStandIn


class Ones(StandIn):
    """Stands for ones."""

    made = 0

    def _made(self) -> torch.Tensor:
        self.made += 1
        return torch.ones(3)


class WatchedOnes(WatchedStandIn):
    """The same for a tensor that is watched."""

    def _made(self) -> torch.Tensor:
        return torch.ones(3)


def test_it_is_made_when_it_is_read() -> None:
    """And not before."""
    ones = Ones()
    assert ones.made == 0
    assert torch.equal(ones.read(), torch.ones(3))
    assert ones.made == 1


def test_it_is_made_where_modes_of_others_see_it() -> None:
    """A mode that is not this engine's counts what runs, as it does in plain backward."""
    with _Counts() as counts:
        Ones().read()
    assert counts.seen > 0


class _Counts(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_a_tensor_that_was_written_to_is_refused() -> None:
    """Until it is gone: what nobody has any more, nobody changes."""
    tensor = torch.zeros(3)
    ones = WatchedOnes(tensor, lambda: ValueError("changed"))
    assert torch.equal(ones.read(), torch.ones(3))
    tensor.add_(1)
    with pytest.raises(ValueError, match="changed"):
        ones.read()
    del tensor
    assert torch.equal(ones.read(), torch.ones(3))
