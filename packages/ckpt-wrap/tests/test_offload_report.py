"""What offload moved is added up over a module and all below it, each once."""

from __future__ import annotations

import torch
from torch import nn

from ckpt_wrap import checkpoint_wrapper, offload_, offload_stats


def test_statistics_count_a_module_once(tmp_path):
    """A module that finds missing attributes in the module it holds is not that module."""

    class Holds(nn.Module):
        def __init__(self, inner) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x):
            return self.inner(x)

    for wrap in (Holds, checkpoint_wrapper):
        inner = offload_(nn.Tanh(), to=tmp_path, min_bytes=1)
        inner(torch.randn(16, 16, requires_grad=True))
        assert offload_stats(wrap(inner)) == offload_stats(inner)
