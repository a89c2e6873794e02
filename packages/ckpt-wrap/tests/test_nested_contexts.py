"""One selective context_fn for a module and one inside it."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import ckpt_wrap


def leaf(*shape):
    """A random leaf that requires grad."""
    return torch.randn(*shape, requires_grad=True)


def test_one_inside_another_with_selective_contexts():
    """Products, functions, or both are saved; two steps."""
    aten = torch.ops.aten
    for saved in (
        [aten.addmm.default],
        [aten.tanh.default],
        [aten.addmm.default, aten.tanh.default],
    ):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), inner, nn.Tanh(), nn.Dropout())
        changed = copy.deepcopy(plain)

        def contexts(saved=saved):
            return create_selective_checkpoint_contexts(saved)

        ckpt_wrap.checkpoint_(changed[2], context_fn=contexts)
        ckpt_wrap.checkpoint_(changed, context_fn=contexts)
        x = leaf(3, 6)
        for step in range(2):
            found = []
            for model in (plain, changed):
                torch.manual_seed(step)
                found.append(torch.autograd.grad(model(x).exp().sum(), [x, *model.parameters()]))
            assert all(map(torch.equal, *found))
