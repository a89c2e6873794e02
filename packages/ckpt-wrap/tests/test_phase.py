"""A forward can ask which of its runs it is in; the answer is that of its own thread."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_wrap import CheckpointImpl, checkpoint_, is_checkpointing, is_recomputing


def test_is_recomputing_only_while_recomputing(wrap):
    """False in forward, True in the second run, False again after."""

    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.seen = []

        def forward(self, x):
            self.seen.append(is_recomputing())
            return torch.tanh(self.linear(x))

    module = wrap(Watch())
    module(torch.randn(1, 2, requires_grad=True)).sum().backward()
    assert module.seen == [False, True]
    assert not is_recomputing()


@pytest.mark.parametrize("impl", CheckpointImpl)
def test_is_checkpointing_in_both_runs_and_nowhere_else(impl):
    """Before, between, after, without gradients, and after a forward that failed: False."""
    seen, bad = [], [False]

    class Watch(nn.Linear):
        def forward(self, x):
            seen.append(is_checkpointing())
            if bad[0]:
                raise ValueError
            return torch.tanh(super().forward(x))

    module = checkpoint_(Watch(2, 2), checkpoint_impl=impl)
    loss = module(torch.randn(1, 2, requires_grad=True)).sum()
    assert (seen, is_checkpointing()) == ([True], False)
    loss.backward()
    assert (seen, is_checkpointing()) == ([True, True], False)
    with torch.no_grad():
        module(torch.randn(1, 2))
    assert seen == [True, True, False]
    bad[0] = True
    with pytest.raises(ValueError):
        module(torch.randn(1, 2, requires_grad=True))
    assert (seen[-1], is_checkpointing()) == (True, False)
