"""A budget on the device: `fit_` reads what its allocator counts, and may offload."""

from __future__ import annotations

import copy
from itertools import takewhile

import pytest
import torch
from torch import nn

from sac_policies import fit_
from sac_policies.budget._fit_in_place import LEVELS, _divisions, _Search
from sac_policies.budget._measure import highest
from sac_policies.budget._run import BACKWARD
from sac_policies.budget._step import Step


class Block(nn.Module):
    """A residual block; x is (rows, 32)."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        """Apply it."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def _search(model, step):
    """Over the outermost blocks."""
    return _Search(model, step, next(iter(_divisions(model, step))))


def gradients(model, x):
    """Of a step, on the host."""
    model.zero_grad()
    model(x).sum().backward()
    torch.accelerator.synchronize()
    return [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("budget", ["80%", "60%"])
def test_a_step_fits_as_predicted(sim, device, budget):
    """Measured again from outside, by the allocator; gradients to the last bit."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(32, 4))
    twin = copy.deepcopy(model).to(device)
    model.to(device)
    x = torch.randn(512, 32, device=device)
    found = fit_(model, x, budget)
    assert found
    assert found.predicted_bytes == pytest.approx(found.peak_bytes, rel=0.02)
    assert found.peak_bytes <= found.budget_bytes
    assert all(map(torch.equal, gradients(model, x), gradients(twin, x)))

    def peak(one):
        one.zero_grad()
        torch.ones((), device=device, requires_grad=True).mul(1.0).backward()  # ends what was held
        torch.accelerator.synchronize()
        before = torch.simdev.memory_allocated(device)
        torch.simdev.reset_peak_memory_stats(device)
        one(x).sum().backward()
        return torch.simdev.max_memory_allocated(device) - before

    assert peak(twin) - peak(model) >= 0.95 * (found.plain_bytes - found.peak_bytes)
    found.undo()
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_region_may_offload(sim, device):
    """On an accelerator it is one of the levels; gradients are the plain ones."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(32, 4)).to(device)
    x = torch.randn(512, 32, device=device)
    plain = gradients(model, x)
    search = _search(model, Step("here", model, x, None))
    assert search._levels == len(LEVELS)
    does = search.put((4, 4, 4))
    assert {region.level for region in does} == {"offloads matmuls"}
    assert all(map(torch.equal, gradients(model, x), plain))
    assert highest(search._intervals(4)) < highest(search._intervals(1))
    search.undo()


@pytest.mark.parametrize("copy_us", [0, 5000])
@pytest.mark.parametrize(
    "choice", [(4, 0, 0, 0), (0, 0, 0, 4), (0, 4, 1, 4), (4, 2, 3, 0), (4, 4, 2, 0), (4, 4, 4, 4)]
)
def test_regions_that_offload_fit_as_predicted(sim, device, choice, copy_us):
    """To the byte, beside regions that do not, and however long copies take."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(32, 4)).to(device)
    x = torch.randn(512, 32, device=device)
    step = Step("here", model, x, None)
    search = _search(model, step)
    sim.simulate(kernel_us=20, copy_us=copy_us, virtual=True)
    plain = search._intervals(0)
    search._learn()
    measured = [plain, *(search._intervals(level) for level in range(1, search._levels))]
    steps = search._steps(measured, [[]] * search._levels)
    assert step.resident() + steps.growth(choice) == search._measured(choice)
    search.undo()


def test_what_is_measured_is_that_of_a_host_far_ahead(sim, device):
    """Also where the host waits for the copies inside of regions, and could let go of values."""
    sim.simulate(kernel_us=20, copy_us=5000, virtual=True)
    found = []
    for waits in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(32, 4)).to(device)
        for block in model[:-1] if waits else ():
            block.down.register_forward_hook(lambda *_: torch.accelerator.synchronize())
        step = Step("here", model, torch.randn(512, 32, device=device), None)
        search = _search(model, step)
        forward = takewhile(lambda each: each.key != BACKWARD, search._intervals(4)[1:])
        found.append([(each.grown, each.most, each.moved) for each in forward])
        search.undo()
    assert any(moved.out for *_, moved in found[0])
    assert found[0] == found[1]
