"""Parameters whose memory is freed while a region waits for backward, as FSDP does."""

from __future__ import annotations

import pytest
import torch

from sac_policies import MutationError
from sac_policies._torch_compat import is_freed
from sac_policies.eager._guards import Guard


@pytest.mark.parametrize("numel", [8, 9000])
def test_guard_does_not_read_freed_memory(numel: int) -> None:
    """Neither of a small tensor nor of a large one."""
    tensor = torch.randn(2, numel)[1]
    guard = Guard(tensor)
    guard.check(tensor, MutationError)
    tensor.untyped_storage().resize_(0)
    assert is_freed(tensor)
    with pytest.raises(MutationError):
        guard.check(tensor, MutationError)


def test_empty_tensor_is_not_freed() -> None:
    """It has no elements to free."""
    assert not is_freed(torch.empty(0, 3))
    assert not is_freed(torch.ones(3))
