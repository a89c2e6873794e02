"""Offload to a folder, which works the same on every device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement


class Reuse(nn.Module):
    """Saves its input several times and one other tensor."""

    def forward(self, x):
        """Run."""
        return torch.sin(x) + torch.cos(x) + torch.tanh(x)


def leaf(device, *shape):
    """A random leaf that requires grad."""
    return torch.randn(*shape, device=device, requires_grad=True)


@requirement(
    "CW-071",
    level="MUST",
    text=(
        "Each storage MUST leave once, parameters and buffers never, and the statistics MUST be"
        " exact to the byte."
    ),
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="offload",
)
def test_statistics_are_exact(part, device, tmp_path):
    """Two storages of 1024 bytes; and of a linear layer, its input only."""
    module = part.offload_(Reuse(), to=tmp_path, min_bytes=1)
    loss = module(leaf(device, 16, 16)).sum()
    stats = part.offload_stats(module)
    assert (stats.copies_out, stats.bytes_out, stats.bytes_away) == (2, 2048, 2048)
    loss.backward()
    stats = part.offload_stats(module)
    assert (stats.copies_in, stats.bytes_in, stats.bytes_away) == (2, 2048, 0)
    linear = part.offload_(nn.Linear(16, 16, device=device), to=tmp_path, min_bytes=1)
    linear(leaf(device, 4, 16)).sum().backward()
    assert part.offload_stats(linear).bytes_out == 4 * 16 * 4


@requirement(
    "CW-075",
    level="MUST",
    text="A kept tensor changed in place before backward MUST raise and name the module.",
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="offload",
)
def test_a_kept_tensor_changed_in_place(part, device, tmp_path):
    """The error names the module's class."""
    module = part.offload_(Reuse(), to=tmp_path, min_bytes=10**9)
    x = leaf(device, 4, 4) * 1
    loss = module(x).sum()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="Reuse"):
        loss.backward()
