"""The reentrant implementation: any arguments, any result, and what it says it cannot do."""

from __future__ import annotations

import torch
from torch import nn

from ckpt_wrap import CheckpointImpl, checkpoint_wrapper


class OnlyKeywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, *, a=None, b=None):
        return self.linear(a), self.linear(b)


def test_keyword_only_arguments_work_reentrantly():
    """A module that takes keywords only can be checkpointed with REENTRANT."""
    model = checkpoint_wrapper(OnlyKeywords(), checkpoint_impl=CheckpointImpl.REENTRANT)
    x = torch.ones(4, 10, requires_grad=True)
    assert len(model(a=x, b=x)) == 2
