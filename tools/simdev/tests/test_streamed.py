"""Frozen weights in host memory on one rank, streamed one unit ahead."""

from __future__ import annotations

import gc

import pytest
import torch
from simdev.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import flat_param

WIDTH, ROWS, RANK, UNITS, STEPS = 256, 8, 2, 12, 3
UNIT_BYTES = 4 * WIDTH * WIDTH


class Adapted(nn.Module):
    """A frozen linear layer and its trained adapter, as in LoRA."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def model():
    """Return a model with fixed weights, on the CPU."""
    torch.manual_seed(1)
    return nn.Sequential(*(Adapted() for _ in range(UNITS)))


def trained(rank, streamed, copy_us=0):
    """Return races, trained weights, the peak and the time of a step."""
    sim = torch.simdev
    sim.reset()
    gc.collect()
    sim.empty_cache()
    start = sim.memory()["allocated"]
    built = model()
    if streamed:
        options = {"mesh": init_device_mesh("simdev", (1,)), "offload_policy": CPUOffloadPolicy()}
        for module in (*built, built):
            flat_param.fully_shard(module, **options)
    else:
        built = built.to("simdev:0")
    optimizer = torch.optim.SGD([p for p in built.parameters() if p.requires_grad], lr=0.1)
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).to("simdev:0")
    sim.simulate(virtual=True, kernel_us=100, copy_us=copy_us)
    for _ in range(STEPS):
        optimizer.zero_grad()
        sim.synchronize_all()
        sim.reset_peak_memory_stats()
        begin = sim.host_us()
        built(x).square().mean().backward()
        sim.synchronize_all()
        spent = sim.host_us() - begin
        peak = sim.memory()["allocated_peak"] - start
        optimizer.step()
    races = sim.races()
    frozen = [
        name for name, p in built.named_parameters() if not p.requires_grad and p.grad is not None
    ]
    state = flat_param.full_state_dict(built)["model"] if streamed else built.state_dict()
    weights = {name: value.cpu().tolist() for name, value in state.items()}
    return {"races": races, "weights": weights, "peak": peak, "us": spent, "frozen": frozen}


def both(rank):
    """Run with all weights on the device, and with weights in host memory."""
    return {
        "resident": trained(rank, streamed=False),
        "streamed": trained(rank, streamed=True),
        "slow link": trained(rank, streamed=True, copy_us=100),
    }


@pytest.fixture(scope="module")
def found():
    """Results of one rank."""
    (told,) = on_ranks(both, size=1)
    return told


def test_weights_have_the_bits_of_training_on_the_device(found):
    """Streaming is bit-identical, and no stream reads before a copy has arrived."""
    for way in ("streamed", "slow link"):
        assert found[way]["races"] == []
        assert found[way]["weights"].keys() == found["resident"]["weights"].keys()
        for name, value in found[way]["weights"].items():
            assert value == found["resident"]["weights"][name], name


def test_device_has_two_units_of_frozen_weights_at_most(found):
    """The current unit and the next one; frozen weights have no gradients."""
    assert found["resident"]["peak"] > UNITS * UNIT_BYTES
    activations = UNITS * 5 * 4 * ROWS * WIDTH
    adapters = UNITS * 2 * 4 * 2 * RANK * WIDTH
    assert found["streamed"]["peak"] <= 2 * UNIT_BYTES + activations + adapters
    assert found["streamed"]["frozen"] == []


def test_copies_run_beside_computation(found):
    """With copies as long as a kernel, weights arrive in time; the step waits for nothing else."""
    copies_in = 2 * 2 * UNITS * 100  # forward and backward; frozen and trained weights of each unit
    copies_out = 2 * UNITS * 100
    extra = found["slow link"]["us"] - found["streamed"]["us"]
    assert extra - copies_out <= 0.1 * copies_in
