"""Training on the device gives the CPU's results."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16)),
    "attention": lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
    "convolution": lambda: nn.Sequential(nn.Conv1d(6, 8, 3, padding=1), nn.SiLU()),
    "embedding": lambda: nn.Sequential(nn.Flatten(0), Indices(), nn.Embedding(10, 16)),
}


class Indices(nn.Module):
    def forward(self, x):
        return (x.detach().abs() * 3).long().clamp(max=9)


def train(model, x, device, **options):
    """Return gradients and parameters after two steps."""
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-2, **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(x.to(device)).square().mean().backward()
        optimizer.step()
    return [t.detach().cpu() for p in model.parameters() for t in (p.grad, p)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_training_gives_what_it_gives_on_the_cpu(sim, device, name, options):
    """Forward, backward and each kind of optimizer step, up to rounding: torch has other
    implementations for CPU tensors.
    """
    model, x = MODELS[name](), torch.randn(4, 6, 16)
    expected = train(model, x, "cpu", **options)
    sim.simulate(kernel_us=20, jitter=True)
    got = train(model, x, device, **options)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert sim.races() == []


def test_random_numbers_are_replayed_from_a_state(sim, device):
    """Each device has its own generator."""
    x = torch.ones(64, device=device)
    state = sim.get_rng_state(device)
    a, b = (torch.dropout(x, 0.5, True) for _ in range(2))
    sim.set_rng_state(state, device)
    assert torch.equal(a, torch.dropout(x, 0.5, True))
    assert not torch.equal(a, b)
    torch.manual_seed(0)
    c = torch.randn(4, device=device)
    torch.manual_seed(0)
    assert torch.equal(c, torch.randn(4, device=device))


def test_autocast_and_devices_mixed_up(sim, device):
    """Matrix products in half precision; tensors of two devices are refused."""
    a = torch.ones(2, 2, device=device)
    with torch.autocast("simdev", torch.bfloat16):
        assert (a @ a).dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="simdev:0 and simdev:1"):
        a + a.to("simdev:1")
    with pytest.raises(RuntimeError, match="simdev:0 and cpu!"):
        a + torch.ones(2, 2)


def test_errors_of_the_kernels_come_at_once(sim, device):
    """Shapes are checked before a kernel is queued."""
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.ones(2, 3, device=device) @ torch.ones(2, 3, device=device)
