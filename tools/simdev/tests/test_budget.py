"""Budgets on the device: `fit_` reads its allocator, and may offload."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from itertools import pairwise, takewhile
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sac_policies import fit_, offload_stats
from sac_policies.budget import _measure, _profile
from sac_policies.budget._fit_in_place import _divisions, _Search
from sac_policies.budget._levels import HIDDEN_AWAY, INPUTS_AWAY, LEVELS, RECOMPUTES
from sac_policies.budget._repeating import Calls
from sac_policies.budget._step import BACKWARD, Step


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


_OPEN = ExitStack()
"""Trials of the running test."""


@pytest.fixture(autouse=True)
def _trials_end():
    with _OPEN:
        yield


def _search(model, step):
    """Over the outermost blocks; trials may run until the test ends."""
    _OPEN.enter_context(step.trials())
    with Calls(model) as calls:
        step.run()
    return _Search(model, step, next(iter(_divisions(model, step, calls))), calls)


def forward_of(intervals):
    """Intervals before backward."""
    return list(takewhile(lambda each: each.key != BACKWARD, intervals))


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


@pytest.mark.parametrize("level", [INPUTS_AWAY, HIDDEN_AWAY])
def test_blocks_may_offload(sim, device, level):
    """They leave nothing on the device, not even inputs; gradients are the plain ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), *(Block() for _ in range(3))).to(device)
    x = torch.randn(512, 32, device=device)
    plain = gradients(model, x)
    search = _search(model, Step(model, x, None))
    assert search._levels == len(LEVELS)
    search._hide_copies()
    does = search.put((level,) * 3)
    assert {region.level for region in does} == {LEVELS[level]}
    assert all(map(torch.equal, gradients(model, x), plain))
    search._learn()  # the first steps compare bits
    left = [forward_of(search._intervals((each,) * 3)) for each in (level, RECOMPUTES)]
    kept, again = (sum(each.grown for each in forward) for forward in left)
    statistics = 3 * 2 * 4 * len(x) if level == HIDDEN_AWAY else 0  # of a norm that is offloaded
    assert kept - again == statistics - 3 * x.nbytes
    search.undo()


@pytest.mark.parametrize("copy_us", [0, 5000])
@pytest.mark.parametrize(
    "choice", [(4, 0, 0, 0), (0, 0, 0, 4), (0, 4, 1, 3), (3, 2, 4, 0), (3, 4, 2, 0), (4, 4, 4, 4)]
)
def test_regions_that_offload_fit_as_predicted(sim, device, choice, copy_us):
    """Exact, also next to regions that do not offload, however long copies take."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), *(Block() for _ in range(4)), nn.Linear(32, 4)).to(
        device
    )
    x = torch.randn(512, 32, device=device)
    step = Step(model, x, None)
    search = _search(model, step)
    search._hide_copies()
    sim.simulate(kernel_us=20, copy_us=copy_us, virtual=True)
    plain = search._intervals((0,) * 4)
    search._learn()
    measured = [plain, *(search._intervals((level,) * 4) for level in range(1, search._levels))]
    steps = search._steps(measured)
    assert step.resident() + steps.growth(choice) == search._peak(search._intervals(choice))
    search.undo()


@pytest.fixture
def virtual(sim, monkeypatch):
    """Kernels take 100 us and copies a nanosecond for each byte, by the packages' clocks too."""
    costs = {"kernel_us": 100, "virtual": True}
    sim.simulate(**costs, copy_gbps=1)
    clock = SimpleNamespace(perf_counter_ns=lambda: int(sim.host_us() * 1e3))
    for module in (_measure, _profile):
        monkeypatch.setattr(module, "time", clock)
    return costs


def test_copies_hide_behind_forward_and_backward(sim, device, virtual):
    """A forward is as long as with instant copies; only the last block's values are waited for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), *(Block() for _ in range(6))).to(device)
    x = torch.randn(1024, 32, device=device)
    search = _search(model, Step(model, x, None))
    search._hide_copies()
    search.put((HIDDEN_AWAY,) * 6)
    region = search._regions[0]
    assert region.hidden.choices

    def step():
        """Return when forward and backward have ended, and what has moved."""
        before = offload_stats()
        times = [sim.host_us()]
        loss = model(x).sum()
        for run in (lambda: None, loss.backward):
            run()
            torch.accelerator.synchronize()
            times.append(sim.host_us())
        moved = offload_stats()
        assert moved.late == before.late
        assert moved.bytes_out - before.bytes_out == pytest.approx(6 * region.hidden_bytes, rel=0.1)
        return [end - start for start, end in pairwise(times)]

    step()
    forward, backward = step()
    sim.simulate(**virtual)
    at_once = step()
    block = at_once[0] * 1e3 / 6
    assert forward == pytest.approx(at_once[0], abs=1)
    assert backward <= at_once[1] + region.hidden_bytes / 1e3
    assert x.nbytes < region.hidden_bytes <= block
    search.undo()


def test_what_is_measured_is_that_of_a_host_far_ahead(sim, device):
    """The host does not wait for copies inside regions, and no values are freed early."""
    sim.simulate(kernel_us=20, copy_us=5000, virtual=True)
    found = []
    for waits in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), *(Block() for _ in range(3))).to(device)
        for block in model[1:] if waits else ():
            block.down.register_forward_hook(lambda *_: torch.accelerator.synchronize())
        step = Step(model, torch.randn(512, 32, device=device), None)
        search = _search(model, step)
        forward = forward_of(search._intervals((INPUTS_AWAY,) * len(search._regions)))[1:]
        found.append([(each.grown, each.most, each.away) for each in forward])
        search.undo()
    assert any(away for *_, away in found[0])
    assert found[0] == found[1]


def blocks_on(device, depth=3):
    """Return a stack of blocks behind a layer, and its batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), *(Block() for _ in range(depth))).to(device)
    return model, torch.randn(512, 32, device=device)


@pytest.mark.parametrize("room", [0, 1 << 17])
def test_host_without_memory_keeps_values_on_the_device(sim, device, room):
    """Some or all of them; budgets that need no offload are met, gradients are the plain ones."""
    model, x = blocks_on(device)
    plain = gradients(model, x)
    torch.simdev.limit_pinned(room)
    for level in (INPUTS_AWAY, HIDDEN_AWAY):
        search = _search(model, Step(model, x, None))
        search._hide_copies()
        search.put((level,) * 3)
        before = offload_stats()
        assert all(map(torch.equal, gradients(model, x), plain))
        copies = offload_stats().copies_out - before.copies_out
        assert (copies > 0) is (room > 0)
        assert copies < 3
        search.undo()
    found = fit_(model, x, "75%")
    assert found
    assert found.peak_bytes <= found.budget_bytes
    assert all(map(torch.equal, gradients(model, x), plain))
    found.undo()


@pytest.mark.parametrize("level", [INPUTS_AWAY, HIDDEN_AWAY])
def test_slower_link_costs_time_alone(sim, device, virtual, level):
    """A step takes longer than planned: not more memory, and nothing is read too early."""
    model, x = blocks_on(device)
    plain = gradients(model, x)
    step = Step(model, x, None)
    search = _search(model, step)
    search._hide_copies()
    search.put((level,) * 3)
    gradients(model, x)
    peak = search._peak(search._intervals((level,) * 3))
    sim.simulate(**virtual, copy_gbps=0.01)
    before = offload_stats().late
    assert all(map(torch.equal, gradients(model, x), plain))
    assert offload_stats().late == before
    assert search._peak(search._intervals((level,) * 3)) == peak
    search.undo()


@pytest.mark.parametrize("after", [1, 5, 20])
@pytest.mark.parametrize("name", ["copy to host", "copy to device"])
def test_failed_copy_leaves_the_model_as_it_was(sim, device, name, after):
    """Whichever copy of which measured step it is; fitted again, it trains as before."""
    model, x = blocks_on(device)
    plain = gradients(model, x)
    before = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    sim.fail_later(name, after)
    with pytest.raises(RuntimeError, match="copy"):
        fit_(model, x, "45%")
    sim.fail_later("", 0)
    assert all("forward" not in vars(module) for module in model.modules())
    now = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    assert all(torch.equal(now[name], each) for name, each in before.items())
    found = fit_(model, x, "75%")
    assert found
    assert all(map(torch.equal, gradients(model, x), plain))
    found.undo()
