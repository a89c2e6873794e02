"""Modules changed in place."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass

import torch
from torch import nn

from torchparts_conformance import requirement


@dataclass
class Batch:
    """Two tensors."""

    x: torch.Tensor
    scale: torch.Tensor


class Block(nn.Module):
    """Takes and gives nested tensors; random."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, batch, *, extra=None):
        """Run."""
        y = torch.tanh(self.linear(batch.x)) * batch.scale
        y = nn.functional.dropout(y + extra["t"][0], 0.5)
        return {"batch": Batch(y, batch.scale * 2)}


def leaf(device, *shape):
    """A random leaf that requires grad."""
    return torch.randn(*shape, device=device, requires_grad=True)


@requirement(
    "CW-060",
    level="MUST",
    text=(
        "`checkpoint_` and `offload_` MUST return the module itself with its names, class "
        "relations, repr and signature unchanged."
    ),
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="in-place",
)
def test_the_module_stays_what_it_is(part, device):
    """Identity, names, classes, repr and signature."""
    for change in (part.checkpoint_, part.offload_):
        plain = nn.Sequential(Block(), nn.BatchNorm1d(2)).to(device)
        changed = copy.deepcopy(plain)
        assert change(changed[0]) is changed[0]
        change(changed)
        for names in ("named_parameters", "named_buffers", "named_modules", "named_children"):
            expected = [name for name, _ in getattr(plain, names)()]
            assert [name for name, _ in getattr(changed, names)()] == expected
        assert changed.state_dict()._metadata == plain.state_dict()._metadata
        assert isinstance(changed[0], Block)
        assert len(changed) == 2
        assert repr(changed) == repr(plain)
        assert inspect.signature(changed[0].forward) == inspect.signature(plain[0].forward)
