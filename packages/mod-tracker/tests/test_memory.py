"""Bytes that operators allocate, by module."""

from __future__ import annotations

import torch
from torch import nn

from mod_tracker import profile_memory
from mod_tracker.reports._memory import MemoryRow

from ._small import shows_saved


@shows_saved
def test_saved_bytes_equal_those_of_autograd():
    """relu saves its result; a layer saves its input, and its weight, which does not count."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU())
    with profile_memory(model) as report:
        model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert report["Sequential.0"].saved == 2 * 4 * 4
    assert report["Sequential.1"].saved == 2 * 8 * 4
    assert report["Sequential"].saved == 2 * 4 * 4 + 2 * 8 * 4


@shows_saved
def test_checkpointing_saves_only_the_input(checkpointed):
    """The inner layers of a checkpointed part save nothing in forward."""
    model = checkpointed(use_reentrant=True)
    with profile_memory(model) as report:
        output = model(torch.randn(2, 4, requires_grad=True))
    assert report["Checkpointed.m.b"].saved == 0
    assert report["Checkpointed"].saved == 2 * (2 * 4 * 4)
    assert output.requires_grad


def test_peak_has_no_freed_bytes():

    class Scratch(nn.Module):
        def forward(self, x):
            (x + 1).sum()
            return x

    with torch.no_grad(), profile_memory() as report:
        nn.Sequential(Scratch())(torch.zeros(1000))
    row = report["Sequential.0"]
    assert row.allocated == 4004
    assert row.peak == report.peak == 4000 + 4004


def test_static_bytes_and_optimizer_state(mlp, x):
    """Parameters, gradients and optimizer state by module."""
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1, momentum=0.9)
    with profile_memory(mlp, optimizer=optimizer) as report:
        mlp(x).sum().backward()
        optimizer.step()
    row = report["MLP.a"]
    assert (row.parameters, row.gradients, row.optimizer) == (64, 64, 64)
    assert report["MLP"].parameters == 128


def test_tied_parameter_counts_once(x):
    """A shared parameter counts where it is first registered."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    with profile_memory(model) as report:
        model(x).sum().backward()
    assert report.totals["parameters"] == report["Sequential.0"].parameters == 64


def test_memory_of_a_module_that_overrides_its_listings(x):

    class Closed(nn.Linear):
        def named_modules(self, *args, **kwargs):
            raise ZeroDivisionError

        named_children = named_parameters = parameters = buffers = modules = named_modules

    model = nn.Sequential(Closed(4, 4))
    with profile_memory(model) as report:
        model(x).sum().backward()
    assert report["Sequential.0"].parameters == 80


def flat_model():
    """Two layers whose weights are views of one storage, like flat parameters."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    flat = torch.randn(32)
    for layer, part in zip(model, flat.split(16), strict=True):
        layer.weight = nn.Parameter(part.view(4, 4))
    return model


def test_views_of_one_storage_have_separate_gradients(x):
    model = flat_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with profile_memory(model, optimizer=optimizer) as report:
        model(x).sum().backward()
        optimizer.step()
    assert [report[f"Sequential.{i}"].parameters for i in (0, 1)] == [128, 0]
    assert [report[f"Sequential.{i}"].gradients for i in (0, 1)] == [64, 64]
    assert [report[f"Sequential.{i}"].optimizer for i in (0, 1)] == [64, 64]


def test_gradients_in_one_bucket_count_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for layer, part in zip(model, torch.zeros(32).split(16), strict=True):
        layer.weight.grad = part.view(4, 4)
    with profile_memory(model) as report:
        pass
    assert report.totals["gradients"] == report.sum("self_gradients") == 128
    assert report["Sequential.0"].gradients == 128


def test_buffers_kept_for_backward_are_not_saved_bytes(x):
    """Like parameters, buffers stay alive after backward, so they do not count."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.full((4,), 2.0))
            self.register_buffer("none", None)

        def forward(self, x):
            return x * self.scale

    model = Scaled()
    with profile_memory(model) as report:
        model(x).sum().backward()
    assert report["Scaled"].saved == 0
    assert report.totals["parameters"] == 0


def test_state_in_lists_counts(x):
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with profile_memory(model, optimizer=optimizer) as report:
        optimizer.step(closure)
    state = optimizer.state[model.weight]
    lists = sum(t.nbytes for name in ("old_dirs", "old_stps", "ro") for t in state[name])
    assert lists > 0
    assert report["Linear"].optimizer >= lists + state["d"].nbytes + state["prev_flat_grad"].nbytes


@shows_saved
def test_sums_of_every_kind_are_those_of_the_rows(checkpointed, x):
    model = checkpointed(use_reentrant=False)
    optimizer = torch.optim.Adam(model.parameters())
    with profile_memory(model, optimizer=optimizer) as report:
        model(x).sum().backward()
        optimizer.step()
    assert {kind: report.sum(f"self_{kind}") for kind in report.totals} == report.totals
    assert min(report.totals.values()) > 0


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2).view(-1)


def test_what_was_there_before_is_not_counted():
    x, model = torch.ones(1000), InPlace()
    with profile_memory() as report:
        y = model(x)
        del x, y
    assert report["InPlace"] == MemoryRow("InPlace", calls=1)
    assert (report.total, report.peak) == (0, 0)


def test_storage_made_by_a_module_counts_once():
    """Views and in-place changes add nothing."""
    with profile_memory() as report:
        y = nn.Sequential(nn.ReLU(), InPlace())(torch.ones(1000)[:])
        del y
    assert report["Sequential.0"].allocated == report["Sequential"].allocated == 4000
