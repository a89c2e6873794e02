"""Who holds memory, steps that leave some behind, and pages written when it runs out."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import mod_tracker


def linear():
    """A 4 x 4 layer without bias: each product has 2 * rows * 16 operations."""
    return nn.Linear(4, 4, bias=False)


def leaf():
    """An input that requires a gradient."""
    return torch.randn(2, 4, requires_grad=True)


def step(model, *args, **kwargs):
    """One forward and backward."""
    model(*args, **kwargs).sum().backward()


class MLP(nn.Module):
    """Two layers with a relu between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x):
        """Compute."""
        return self.b(self.a(x).relu())


def _changes_what_was_saved(measure):
    x = leaf()
    with pytest.raises(RuntimeError), measure():
        y = x.exp()
        y.add_(1)
        y.sum().backward()


class _Blocks(nn.Module):
    """A layer, and two that `call` calls, which is given them and what they are called with."""

    def __init__(self, call):
        super().__init__()
        self.first, self.block = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.call = call

    def forward(self, x):
        return self.call(self.block, self.first(x))


@pytest.mark.parametrize("fused", [False, True])
def test_flops_of_steps_alike(fused):
    """As many times those of one."""
    torch.manual_seed(0)
    model, x = MLP(), leaf()
    if fused:
        model = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True).eval()
        x = torch.randn(2, 6, 16)

    def run():
        if fused:
            with torch.inference_mode():
                model(x)
        else:
            step(model, x)

    totals = []
    for times in (1, 7):
        with mod_tracker.profile_flops() as report:
            for _ in range(times):
                run()
        totals.append(report.total)
    assert totals[0] > 0
    assert totals[1] == 7 * totals[0]


def test_who_holds_the_memory():
    """By kind and module, and once more when memory runs out."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), leaf()
    with mod_tracker.watch_memory(model) as watch:
        model(x).sum().backward()
        output = model(x)
        page = watch.page()
    kinds, parameters = page.by_kind(), 4 * (4 * 8 + 8 + 8 * 2 + 2)
    assert kinds["parameters"] == kinds["gradients"] == parameters
    assert kinds["inputs"] == 4 * x.numel()
    assert page.inside("saved").get("Sequential.1") == 4 * len(x) * 8
    assert page.total == sum(kinds.values()) == sum(held.size for held in page.held)
    with pytest.raises(MemoryError), mod_tracker.watch_memory(model) as watch:
        output = model(x)
        raise MemoryError
    assert watch.pages[0].inside("saved").get("Sequential.1") == 4 * len(x) * 8
    assert output.requires_grad


@pytest.mark.parametrize("leaks", [False, True])
def test_growth_is_found(leaks):
    """A loss that is kept keeps its graph."""
    model, kept = MLP(), []

    def run():
        model.zero_grad()
        loss = model(leaf()).sum()
        loss.backward()
        if leaks:
            kept.append(model(leaf()).sum())

    if leaks:
        with pytest.raises(AssertionError, match=r"a step  MLP"):
            mod_tracker.assert_no_growth(run)
    else:
        mod_tracker.assert_no_growth(run)


def test_watched_change_after_saving_is_an_error():
    """As without anybody watching."""
    _changes_what_was_saved(mod_tracker.watch_memory)


@pytest.mark.parametrize("name", ["profile_memory", "watch_memory"])
def test_what_nobody_goes_back_through_is_let_go_of(name):
    """Without a collection of garbage."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), leaf()
    gc.collect()
    gc.disable()
    try:
        with getattr(mod_tracker, name)(model):
            output = model(x)
            storage = weakref.ref(output.untyped_storage())
            del output
            assert storage() is None
    finally:
        gc.enable()


def test_error_that_is_caught_has_a_page():
    """One for each time that memory ran out."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Identity()), leaf()

    def fail(module, args):
        raise MemoryError

    with mod_tracker.watch_memory(model) as watch:
        for _ in range(2):
            gc.collect()
            model(x).sum().backward()
            handle = model[2].register_forward_pre_hook(fail)
            with pytest.raises(MemoryError):
                model(x)
            handle.remove()
    saved = [page.inside("saved").get("Sequential.1") for page in watch.pages]
    assert saved == [4 * len(x) * 8] * 2


@pytest.mark.parametrize("kind", ["none", "reentrant", "non-reentrant", "selective"])
def test_what_a_checkpoint_keeps(kind):
    """Its input, and the products where a policy says so."""
    options = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        products = [torch.ops.aten.addmm.default]
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(products)

    def call(block, given):
        return block(given) if kind == "none" else checkpoint(block, given, **options)

    model, x = _Blocks(call), leaf()
    with mod_tracker.watch_memory(model) as watch:
        output = model(x)
        page = watch.page()
    given, hidden = 4 * len(x) * 6, 4 * len(x) * 8
    inside = {
        kept: sorted(held.size for held in page.held if held.kind == kept and held.module)
        for kept in ("saved", "checkpoint")
    }
    keeps = {"none": [], "selective": [given, hidden]}.get(kind, [given])
    assert inside["saved"] == ([given, hidden] if kind == "none" else [])
    assert [size for size in inside["checkpoint"] if size in (given, hidden)] == keeps
    assert output.requires_grad
