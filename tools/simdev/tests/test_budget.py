"""Budgets on the device: `fit_` reads its allocator, and may offload."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from sac_policies import BudgetError, checkpoint, fit_, profile, solve
from sac_policies.budget import measure_host_bandwidth
from sac_policies.budget._fit_in_place import LEVELS, _divisions, _Search
from sac_policies.budget._intervals import forward_of
from sac_policies.budget._measure import highest
from sac_policies.budget._step import Step


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def _search(model, step):
    """Search over the outermost blocks."""
    return _Search(model, step, "peak", next(iter(_divisions(model, step))))


def gradients(model, x):
    """Return the gradients of a step, on the host."""
    model.zero_grad()
    model(x).sum().backward()
    torch.accelerator.synchronize()
    return [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("budget", ["80%", "60%"])
def test_a_step_fits_as_predicted(sim, device, budget):
    """Measured again by the allocator; gradients are bit-identical."""
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
        # A further backward frees memory that the last one holds.
        torch.ones((), device=device, requires_grad=True).mul(1.0).backward()
        torch.accelerator.synchronize()
        before = torch.simdev.memory_allocated(device)
        torch.simdev.reset_peak_memory_stats(device)
        one(x).sum().backward()
        return torch.simdev.max_memory_allocated(device) - before

    assert peak(twin) - peak(model) >= 0.95 * (found.plain_bytes - found.peak_bytes)
    found.undo()
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_region_may_offload(sim, device):
    """Offload is one of the levels on an accelerator; gradients are plain's."""
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
    """Exact, also next to regions that do not offload, however long copies take."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(32, 4)).to(device)
    x = torch.randn(512, 32, device=device)
    step = Step("here", model, x, None)
    search = _search(model, step)
    sim.simulate(kernel_us=20, copy_us=copy_us, virtual=True)
    plain = search._intervals(0)
    search._learn()
    measured = [plain, *(search._intervals(level) for level in range(1, search._levels))]
    steps, before = search._steps(measured, [[]] * search._levels)
    peak = search._measured(choice).peak
    assert before + steps.growth(choice) == peak
    search.undo()


def test_what_is_measured_is_that_of_a_host_far_ahead(sim, device):
    """The host does not wait for copies inside regions, and no values are freed early."""
    sim.simulate(kernel_us=20, copy_us=5000, virtual=True)
    found = []
    for waits in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(32, 4)).to(device)
        for block in model[:-1] if waits else ():
            block.down.register_forward_hook(lambda *_: torch.accelerator.synchronize())
        step = Step("here", model, torch.randn(512, 32, device=device), None)
        search = _search(model, step)
        forward = forward_of(search._intervals(4))[1:]
        found.append([(each.grown, each.most, each.moved) for each in forward])
        search.undo()
    assert any(moved.out for *_, moved in found[0])
    assert found[0] == found[1]


@pytest.mark.parametrize("regions", [1, 12])
def test_a_plan_may_offload(sim, device, regions):
    """The device holds inputs and no offloaded value; gradients are plain's."""
    torch.manual_seed(0)
    blocks = [Block().to(device) for _ in range(regions)]
    x = torch.randn(512, 32, device=device, requires_grad=True)
    rate = measure_host_bandwidth(device)
    assert rate > 0
    trace = profile(blocks[0], x, unit="ns")
    costly = dataclasses.replace(
        trace, ops=tuple(dataclasses.replace(op, cost=10**9) for op in trace.ops)
    )
    plan = solve(costly, 0, host_bandwidth=rate)
    assert plan
    assert plan.kept_bytes == 0
    assert plan.offloaded_bytes == trace.total_bytes() > 0

    def step(policy):
        x.grad = None
        torch.accelerator.synchronize()
        before = torch.simdev.memory_allocated(device)
        y = x
        for block in blocks:
            y = checkpoint(block, y, policy=policy) if policy else block(y)
        torch.accelerator.synchronize()
        held = torch.simdev.memory_allocated(device) - before
        y.sum().backward()
        torch.accelerator.synchronize()
        return held, x.grad.cpu()

    for policy in (None, plan, plan):
        held, grad = step(policy)
        if policy is None:
            plain, expected = held, grad
        assert torch.equal(grad, expected)
    assert held < plain / 3
    with pytest.raises(BudgetError, match="device 'cpu' is not an accelerator"):
        measure_host_bandwidth("cpu")
