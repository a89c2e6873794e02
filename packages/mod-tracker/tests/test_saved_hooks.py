"""Hooks for saved tensors that step aside for torch.func, and for nothing else."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.autograd import graph
from torch.autograd.graph import save_on_cpu

from mod_tracker import profile_memory, trace, watch_memory
from mod_tracker._torch_compat import DISABLING, SavedHooks, _saved_hooks, top_saved_hooks

TORCHS = graph.disable_saved_tensors_hooks
GENERATOR = TORCHS.__wrapped__


class Gradients(nn.Module):
    """Takes gradients in its forward, and saves something before and after."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        y = (x @ self.weight).tanh()
        inner = torch.func.grad(lambda w: (y.detach() @ w).sin().sum())(self.weight.detach())
        return (y * inner.sum()).sigmoid()


@pytest.fixture(autouse=True)
def _left_as_it_was():
    yield
    assert graph.disable_saved_tensors_hooks is TORCHS
    assert DISABLING.cell_contents is GENERATOR
    assert top_saved_hooks() is None


@pytest.mark.parametrize(
    "report_of", [profile_memory, watch_memory, lambda *roots: trace(*roots, memory=True)]
)
def test_model_with_torch_func_inside_is_not_stopped(report_of, x):
    """It computes what it does without a report."""
    model, found = Gradients(), []
    for measured in (False, True):
        model.zero_grad()
        if measured:
            with report_of(model):
                model(x).sum().backward()
        else:
            model(x).sum().backward()
        found.append(model.weight.grad)
    assert torch.equal(*found)


def test_what_is_saved_around_is_counted_and_hooks_are_back_in_their_order(x):
    """Before and after the function: two results, and what the products save; of two reports."""
    plain = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    with profile_memory(plain) as least:
        plain(x).sum().backward()
    model = Gradients()
    with profile_memory(model) as outer, profile_memory(model) as inner:
        before = top_saved_hooks()
        model(x).sum().backward()
        assert top_saved_hooks() == before
    assert inner["Gradients"].saved >= least["Sequential"].saved > 0
    assert outer["Gradients"].saved == 0  # the innermost hooks are those that are asked


def test_hooks_of_somebody_else_are_refused_as_without_a_report(x):
    """Whoever's are on top; ours are back where they were."""
    model = Gradients()
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"), save_on_cpu():
        model(x)
    for order in ("ours inside", "ours outside"):
        first, second = (save_on_cpu, profile_memory)[:: 1 if order == "ours inside" else -1]
        with first(), second():
            before = top_saved_hooks()
            with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
                model(x)
            assert top_saved_hooks() == before


def test_error_in_the_function_brings_the_hooks_back(x):
    """And goes to who called it."""

    def fails(w):
        raise ZeroDivisionError

    with profile_memory():
        before = top_saved_hooks()
        with pytest.raises(ZeroDivisionError):
            torch.func.grad(fails)(x)
        assert top_saved_hooks() == before


def test_other_threads_are_torchs_own(x):
    """Hooks are of one thread: in another there are none to take off, and functions run."""
    found = []

    def run():
        found.append(top_saved_hooks())
        found.append(torch.func.grad(lambda w: w.sin().sum())(x.detach()))

    with profile_memory():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert found[0] is None
    assert torch.equal(found[1], x.detach().cos())


def test_generator_of_somebody_else_stays(x):
    """One put there meanwhile is not taken away, and one from before is what is run, and left."""
    called = []

    def before(message):
        called.append("before")
        yield from GENERATOR(message)

    def after(message):
        called.append("after")
        yield from ours(message)

    try:
        DISABLING.cell_contents = before
        with profile_memory():
            torch.func.grad(lambda w: w.sin().sum())(x.detach())
            ours, DISABLING.cell_contents = DISABLING.cell_contents, after
            torch.func.grad(lambda w: w.sin().sum())(x.detach())
        assert DISABLING.cell_contents is after
    finally:
        DISABLING.cell_contents = GENERATOR
    assert called == ["before", "after", "before"]


@pytest.mark.skipif(
    torch.__version__.startswith("2.9."), reason="torch 2.9 compiles again in any dispatch mode"
)
def test_compiled_function_runs_as_ever(fresh_compiler, x):
    """Compiled into one graph before the report, it is neither compiled again nor refused."""
    model = Gradients()
    expected = model(x)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    run(x)
    with profile_memory(), torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(run(x), expected)
    assert torch.equal(run(x), expected)


class Cell:
    """What holds torch's generator; `look` is called where it is read."""

    def __init__(self):
        self.there, self.look = GENERATOR, lambda: None

    @property
    def cell_contents(self):
        self.look()
        return self.there

    @cell_contents.setter
    def cell_contents(self, value):
        self.there = value


def test_hooks_that_begin_as_the_last_ones_end_step_aside(monkeypatch, meanwhile):
    """The last ones bring back what was there only if nobody has begun."""
    cell, ends, found = Cell(), threading.Event(), []
    first, second = (SavedHooks(lambda t: t, lambda t: t) for _ in "ab")
    monkeypatch.setattr(_saved_hooks, "DISABLING", cell)

    def begin():
        with second:
            ends.wait(60)
            found.append(cell.there)

    with first:
        cell.look = meanwhile.at(cell.look, begin)
    ends.set()
    meanwhile.ends()
    assert found == [_saved_hooks._aside]
    assert cell.there is GENERATOR
