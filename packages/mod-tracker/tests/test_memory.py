"""Memory per module: allocated, kept for backward, and held whether it runs or not."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from mod_tracker import StateError, profile_memory
from mod_tracker._attribution import Attribution
from mod_tracker._torch_compat import mode_depth, top_saved_hooks
from mod_tracker.reports._memory import KeptTensor, _Saved


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


def flat_model():
    """Two layers whose weights are views of one storage, as flat parameters have them."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    flat = torch.randn(32)
    for layer, part in zip(model, flat.split(16), strict=True):
        layer.weight = nn.Parameter(part.view(4, 4))
    return model


def test_views_of_one_storage_have_gradients_and_state_of_their_own(x):
    """The storage counts where it is registered first, and what is made for each part with it."""
    model = flat_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with profile_memory(model, optimizer=optimizer) as report:
        model(x).sum().backward()
        optimizer.step()
    assert [report[f"Sequential.{i}"].parameters for i in (0, 1)] == [128, 0]
    assert [report[f"Sequential.{i}"].gradients for i in (0, 1)] == [64, 64]
    assert [report[f"Sequential.{i}"].optimizer for i in (0, 1)] == [64, 64]


def test_gradients_in_one_bucket_count_once():
    """As views of a bucket they share its storage."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for layer, part in zip(model, torch.zeros(32).split(16), strict=True):
        layer.weight.grad = part.view(4, 4)
    with profile_memory(model) as report:
        pass
    assert report.totals["gradients"] == report.sum("self_gradients") == 128
    assert report["Sequential.0"].gradients == 128


def test_parameter_in_a_buffers_storage_counts():
    """A buffer is no parameter, wherever the parameter lies."""
    model = nn.Linear(4, 4, bias=False)
    model.register_buffer("flat", torch.zeros(16))
    model.weight = nn.Parameter(model.flat.view(4, 4))
    with profile_memory(model) as report:
        pass
    assert report["Linear"].parameters == 64


def test_buffers_kept_for_backward_are_not_saved_bytes(x):
    """They live anyway, as parameters do."""

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


def test_state_of_a_tied_parameter_counts_once(x):
    """Gradient and optimizer state of a shared parameter are those of one."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with profile_memory(model, optimizer=optimizer) as report:
        model(x).sum().backward()
        optimizer.step()
    assert (report.totals["gradients"], report.totals["optimizer"]) == (64, 64)
    assert report["Sequential.1"].gradients == report["Sequential.1"].optimizer == 0


def test_state_in_lists_counts(x):
    """Of an optimizer that keeps lists of tensors."""
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


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 2), (torch.float64, 8)])
def test_bytes_are_those_of_the_type(dtype, width):
    """Of parameters, gradients, and what is kept."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU()).to(dtype)
    with profile_memory(model) as report:
        model(torch.randn(2, 4, dtype=dtype)).sum().backward()
    row = report["Sequential.0"]
    assert (row.parameters, row.gradients, row.saved) == (32 * width, 32 * width, 8 * width)
    assert report["Sequential.1"].saved == 16 * width


def test_batch_of_nothing_has_no_bytes():
    """A size of zero allocates and keeps nothing."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU())
    with profile_memory(model) as report:
        model(torch.randn(0, 4))
    assert (report.peak, report.totals["allocated"], report.totals["saved"]) == (0, 0, 0)
    assert report["Sequential"].parameters == 128


def test_what_is_outside_is_in_no_module():
    """Allocated and kept there; the largest sum of all is its peak."""
    leaf = torch.ones(10, requires_grad=True)
    with profile_memory() as report:
        y = leaf.exp()
    assert report.rows == {}
    assert (report.outside.allocated, report.outside.saved, report.outside.peak) == (40, 40, 40)
    assert report.total == report.totals["allocated"] == 40
    assert y.requires_grad


def test_parameter_without_memory_is_not_in_the_way():
    """Of a layer that has not run yet."""
    with profile_memory(nn.LazyLinear(3)) as report:
        pass
    assert report["LazyLinear"].parameters == 0


def test_report_as_plain_values_has_peak_and_sums(mlp, x):
    """Beside the rows; and the difference of what a module allocates and frees is no column."""
    with profile_memory(mlp) as report:
        mlp(x).sum().backward()
    plain = report.to_dict()
    assert plain["peak"] == report.peak > 0
    assert plain["totals"] == report.totals
    assert set(plain["totals"]) == {
        *("allocated", "freed", "saved", "parameters", "gradients", "optimizer")
    }
    row = report["MLP.a"]
    assert row.delta == row.allocated - row.freed


def test_sums_of_every_kind_are_those_of_the_rows(checkpointed, x):
    """What modules do themselves, and the outside, add up to what was counted apart."""
    model = checkpointed(use_reentrant=False)
    optimizer = torch.optim.Adam(model.parameters())
    with profile_memory(model, optimizer=optimizer) as report:
        model(x).sum().backward()
        optimizer.step()
    assert {kind: report.sum(f"self_{kind}") for kind in report.totals} == report.totals
    assert min(report.totals.values()) > 0


def test_error_in_the_block_goes_through_and_hooks_are_gone(mlp, x):
    """Nothing is measured after it, and the report stays empty."""
    with pytest.raises(KeyboardInterrupt), profile_memory(mlp) as report:
        mlp(x)
        raise KeyboardInterrupt
    with pytest.raises(StateError, match="the report is empty"):
        report.rows  # noqa: B018
    assert mode_depth() == 0
    assert top_saved_hooks() is None


def test_keeping_that_never_began_ends_quietly(monkeypatch):
    """An interrupt may come before there is anything to keep."""
    unraised = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    kept = KeptTensor.__new__(KeptTensor)
    del kept
    assert unraised == []


def test_what_another_module_made_is_freed_where_it_ends():
    """Not where it was made."""

    class Drops(nn.Module):
        def forward(self, held):
            held.clear()

    model, held = nn.Sequential(Drops()), []
    with torch.no_grad(), profile_memory() as report:
        held.append(torch.zeros(100))
        model(held)
    row = report["Sequential.0"]
    assert (row.allocated, row.freed, row.delta) == (0, 400, -400)
    assert (report.outside.self_allocated, report.outside.self_freed) == (400, 0)
