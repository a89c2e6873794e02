"""Memory per module: allocated, kept for backward, and held whether it runs or not."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from mod_tracker import profile_memory
from mod_tracker._attribution import Attribution
from mod_tracker.reports._memory import _Saved


def test_saved_bytes_are_what_autograd_keeps():
    """relu keeps its result; a layer keeps its input, and its weight, which does not count."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU())
    with profile_memory(model) as report:
        model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert report["Sequential.0"].saved == 2 * 4 * 4
    assert report["Sequential.1"].saved == 2 * 8 * 4
    assert report["Sequential"].saved == 2 * 4 * 4 + 2 * 8 * 4


def test_saved_bytes_count_once_until_the_last_use_ends():
    """A tensor saved again while something keeps it still is the same one."""
    saved, tensor = _Saved(Attribution(limit=9)), torch.ones(4)
    first, second = saved.pack(tensor), saved.pack(tensor)
    del first
    third = saved.pack(tensor)
    assert saved.totals(set()).total == 16
    del second, third
    assert saved.pack(tensor).tensor is tensor
    assert saved.totals(set()).total == 32


def test_checkpointing_saves_only_the_input(checkpointed):
    """The inner layers of a checkpointed part keep nothing in forward."""
    model = checkpointed(use_reentrant=True)
    with profile_memory(model) as report:
        output = model(torch.randn(2, 4, requires_grad=True))
    assert report["Checkpointed.m.b"].saved == 0
    assert report["Checkpointed"].saved == 2 * (2 * 4 * 4)
    assert output.requires_grad


def test_freed_bytes_are_charged_where_they_are_freed():
    """What a module allocates and drops itself leaves no delta, but a peak."""

    class Scratch(nn.Module):
        def forward(self, x):
            (x + 1).sum()
            return x

    with torch.no_grad(), profile_memory() as report:
        nn.Sequential(Scratch())(torch.zeros(1000))
    row = report["Sequential.0"]
    assert (row.allocated, row.delta) == (4004, 0)
    assert row.peak == report.peak == 4000 + 4004


def test_static_bytes_and_optimizer_state(mlp, x):
    """Parameters, gradients and state, each with its module."""
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1, momentum=0.9)
    with profile_memory(mlp, optimizer=optimizer) as report:
        mlp(x).sum().backward()
        optimizer.step()
    row = report["MLP.a"]
    assert (row.parameters, row.gradients, row.optimizer) == (64, 64, 64)
    assert report["MLP"].parameters == 128


def test_module_that_never_ran_has_only_its_parameters(mlp):
    """No peak, nothing allocated and nothing saved; what it holds counts nevertheless."""
    with profile_memory(mlp) as report:
        pass
    row = report["MLP.a"]
    assert (row.peak, row.allocated, row.freed, row.saved) == (0, 0, 0, 0)
    assert (row.self_allocated, row.self_freed, row.self_saved) == (0, 0, 0)
    assert (row.self_parameters, row.parameters) == (64, 64)


def test_tied_parameter_counts_once(x):
    """A shared parameter is charged where it is registered first."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    with profile_memory(model) as report:
        model(x).sum().backward()
    assert report.totals["parameters"] == report["Sequential.0"].parameters == 64


def test_memory_of_fake_tensors_is_that_of_real_ones(checkpointed):
    """Without data, the same bytes."""

    def measure():
        model = checkpointed(use_reentrant=False)
        with profile_memory(model) as report:
            model(torch.randn(2, 4, requires_grad=True)).sum().backward()
        return report.to_dict()

    with FakeTensorMode():
        fake = measure()
    assert fake == measure()


def test_memory_of_a_module_that_overrides_its_listings(x):
    """What a module registers is read from its tables, not by methods it may override."""

    class Closed(nn.Linear):
        def named_modules(self, *args, **kwargs):
            raise ZeroDivisionError

        named_children = named_parameters = parameters = buffers = modules = named_modules

    model = nn.Sequential(Closed(4, 4))
    with profile_memory(model) as report:
        model(x).sum().backward()
    assert report["Sequential.0"].parameters == 80
