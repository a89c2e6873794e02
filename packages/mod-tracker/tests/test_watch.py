"""Who holds the memory: on one page, when asked, above a limit, and when memory runs out."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from mod_tracker import OptionError, StateError, assert_no_growth, profile_memory, watch_memory
from mod_tracker._attribution import NOWHERE
from mod_tracker.reports._holders import Ledger


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def model_and_optimizer():
    """Two blocks and Adam."""
    model = nn.Sequential(Block(), Block())
    return model, torch.optim.Adam(model.parameters())


def train(model, optimizer, x):
    """One step."""
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def test_page_has_every_kind_of_memory():
    """Bytes by kind and by module, from the sizes of the model."""
    model, optimizer = model_and_optimizer()
    x, parameters = torch.randn(4, 8), 2 * 2 * 8 * 32 * 4
    with watch_memory(model, optimizer=optimizer) as watch:
        train(model, optimizer, x)
        loss = model(x).sum()
        page = watch.page()
    kinds = page.by_kind()
    assert kinds["parameters"] == kinds["gradients"] == parameters
    assert kinds["optimizer"] == 2 * parameters + 4 * 4  # two moments, and a step for each tensor
    assert kinds["inputs"] == 4 * 8 * 4
    # Each block keeps its tanh's result, and the first one's output is kept by the second.
    assert page.inside("saved")["Sequential.0"] == (4 * 32 + 4 * 8) * 4
    assert page.inside("saved")["Sequential.1"] == 4 * 32 * 4
    assert page.inside("parameters")["Sequential.0"] == parameters // 2
    assert page.total == sum(kinds.values()) == sum(held.size for held in page.held)
    assert page.by_module()["Sequential.0.up"]["gradients"] == 8 * 32 * 4
    assert loss.requires_grad


class Refusing(torch.Tensor):
    """Answers no question that goes through torch's functions."""

    error = RuntimeError

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise cls.error("no")


class Gone(torch.Tensor):
    """As one whose memory torch has taken away answers: there is nothing."""

    def untyped_storage(self):
        raise NotImplementedError("Cannot access storage of UndefinedTensorImpl")

    def detach(self):
        raise RuntimeError("tensor does not have a device")


@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError])
def test_tensor_that_refuses_to_answer_is_on_the_page(error, monkeypatch):
    """Whatever its class raises: the bytes are there."""
    monkeypatch.setattr(Refusing, "error", error)
    refusing = torch.ones(12345, dtype=torch.uint8).as_subclass(Refusing)
    with watch_memory() as watch:
        page = watch.page()
    assert [(held.kind, held.shape) for held in page.held if held.size == 12345] == [
        ("unseen", (12345,))
    ]
    del refusing


@pytest.mark.parametrize("kind", ["of a lazy layer", "gone"])
def test_tensor_without_memory_is_not_in_the_way(kind):
    """Of a layer that has not run yet, or one that torch has emptied: the page is written."""
    held = torch.ones(3).as_subclass(Gone) if kind == "gone" else nn.LazyLinear(3)
    roots = [held] if isinstance(held, nn.Module) else []
    with watch_memory(*roots) as watch:
        torch.ones(2)
        page = watch.page()
    assert page.total == sum(page.by_kind().values())
    assert not page.by_kind().get("parameters")


def test_tensors_that_stand_for_others_hold_no_memory():
    """Those of a trace, whose sizes may be symbols, and those on the meta device."""
    symbols = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    trace = FakeTensorMode(shape_env=ShapeEnv())
    traced = trace.from_tensor(torch.ones(41, 43), symbolic_context=symbols)
    meta = torch.empty(41, 43, device="meta")
    with watch_memory() as watch:
        page = watch.page()
    assert str(page)
    assert all(type(held.size) is int for held in page.held)
    assert (41, 43) not in [held.shape for held in page.held]
    del traced, meta


def test_page_names_the_line_that_made_a_tensor():
    """Not torch's, and not the tracker's; with module and phase."""
    model, _ = model_and_optimizer()
    with watch_memory(model) as watch:
        output = model(torch.randn(1000, 8))
        page = watch.page()
    largest = next(held for held in page.held if held.kind != "unseen")  # torch's own tables
    assert (largest.size, largest.kind, largest.module) == (1000 * 32 * 4, "saved", "Sequential.0")
    assert (largest.phase, largest.shape) == ("forward", (1000, 32))
    assert largest.line.startswith("test_watch.py:")
    assert output.requires_grad


def test_page_as_text():
    """One page; sections without rows are left out."""
    model, optimizer = model_and_optimizer()
    with watch_memory(model, optimizer=optimizer) as watch:
        train(model, optimizer, torch.randn(4, 8))
        lines = str(watch.page("asked by a test")).splitlines()
    assert lines[0] == "Who holds the memory: asked by a test"
    assert lines[1].endswith("allocations were looked at in 1 of 1 steps")
    assert "parameters, gradients, optimizer inside: to shard or offload" in lines
    assert "kept for backward inside: to checkpoint or offload" not in lines
    assert len(lines) < 60


def test_page_is_written_above_a_limit(caplog):
    """Once, to the log."""
    model, _ = model_and_optimizer()
    caplog.set_level(logging.WARNING, "mod_tracker")
    with watch_memory(model, limit_bytes=100_000) as watch:
        model(torch.randn(4, 8))
        assert watch.pages == []
        model(torch.randn(4000, 8))
        model(torch.randn(4001, 8))
    assert len(watch.pages) == len(caplog.records) == 1
    assert "above the limit of 100 kB" in watch.pages[0].reason
    assert watch.pages[0].by_kind()["saved"] > 0


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    ],
)
def test_page_is_written_when_memory_runs_out(error):
    """The error goes on, with what its frames still hold on the page."""
    model, _ = model_and_optimizer()

    def run():
        output = model(torch.randn(1000, 8))
        raise error
        return output

    with pytest.raises(type(error)) as raised, watch_memory(model) as watch:
        run()
    assert raised.value is error
    assert watch.pages[0].inside("saved")["Sequential.0"] == 1000 * (32 + 8) * 4
    assert sys.version_info < (3, 11) or str(watch.pages[0]) in error.__notes__


def test_other_errors_write_no_page():
    """Nothing ran out."""
    with pytest.raises(ZeroDivisionError), watch_memory() as watch:
        raise ZeroDivisionError
    assert watch.pages == []


def test_a_batch_like_no_other_is_looked_at():
    """A bad batch after many good ones is on the page with the lines that made it."""
    model, optimizer = model_and_optimizer()
    with watch_memory(model, optimizer=optimizer) as watch:
        for _ in range(7):
            train(model, optimizer, torch.randn(4, 8))
        loss = model(torch.randn(5000, 8)).sum()
        page = watch.page()
    assert page.steps == (8, 5)
    assert page.held[0].line.startswith("test_watch.py:")
    assert page.by_kind()["saved"] > 5000 * 2 * 32 * 4
    assert loss.requires_grad


def test_what_was_made_unseen_is_found_where_python_holds_it():
    """Without a line, and said to be so."""
    model, optimizer = model_and_optimizer()
    kept = []
    with watch_memory(model, optimizer=optimizer) as watch:
        for _ in range(7):
            train(model, optimizer, torch.randn(4, 8))
            kept.append(torch.zeros(12_345))
        page = watch.page()
    sizes = [held.kind for held in page.held if held.size == 4 * 12_345]
    assert sorted(sizes) == ["temporaries"] * 4 + ["unseen"] * 3
    assert "not seen made" in str(page)


def test_an_input_that_is_gone_lends_its_number_to_nobody():
    """What is made next may have the same `id`."""
    ledger = Ledger()
    for _ in range(50):
        given = torch.ones(3)
        number = id(given.untyped_storage())
        ledger.given([given])
        del given
        made = torch.zeros(5)
        ledger.add(number, made, 20, NOWHERE, "forward")
        kinds = {held.kind for held in ledger.held({}, None) if held.size == 20}
        assert "temporaries" in kinds
        assert "inputs" not in kinds
        ledger.drop(number)


def test_every_input_is_on_the_page_as_one():
    """Sparse ones, which have several storages, and those that come after them."""

    class Mixes(nn.Module):
        def forward(self, mix, x):
            return torch.sparse.mm(mix, x)

    mix, x = torch.eye(4).to_sparse(), torch.ones(4, 30)
    with watch_memory() as watch:
        y = Mixes()(mix, x)
        page = watch.page()
    assert page.by_kind()["inputs"] == mix._indices().nbytes + mix._values().nbytes + x.nbytes
    assert page.by_kind()["temporaries"] == y.nbytes


def test_what_several_nodes_keep_is_saved_until_the_last_is_gone():
    """Then it is something that nothing keeps for a backward."""
    leaf, kinds = torch.ones(1234, requires_grad=True), []

    def kind():
        kinds.append({held.kind for held in watch.page().held if held.size == 4 * 1234})

    with watch_memory() as watch:
        y = leaf * 1  # keeps neither
        kind()
        first, second = y.square().sum(), y.sin().sum()
        kind()
        del first
        kind()
        del second
        kind()
    assert kinds == [
        {"temporaries", "unseen"},
        {"saved", "unseen"},
        {"saved", "unseen"},
        {"temporaries", "unseen"},
    ]


def test_growth_since_the_step_before_is_on_the_page():
    """By module and line."""
    model, optimizer = model_and_optimizer()
    kept = []
    with watch_memory(model, optimizer=optimizer) as watch:
        for _ in range(3):
            train(model, optimizer, torch.randn(4, 8))
            kept.append(torch.zeros(999))
        page = watch.page()
    assert max(page.grown.values()) == 999 * 4
    assert min(page.grown.values()) > 0
    lines = str(page).splitlines()
    first = lines[lines.index("grew in the last step that was looked at") + 1]
    assert first.split() == ["4", "kB", "(outside),", *first.split()[-1:]]
    assert first.split()[-1].startswith("test_watch.py:")


def test_watching_changes_no_bit():
    """Of parameters after several steps."""
    found = []
    for watched in (False, True):
        torch.manual_seed(0)
        model, optimizer = model_and_optimizer()
        with watch_memory(model) if watched else torch.enable_grad():
            for _ in range(6):
                train(model, optimizer, torch.randn(4, 8))
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("measure", [watch_memory, profile_memory])
def test_changes_in_place_after_saving_are_still_an_error(measure):
    """Hooks for saved tensors would hide them; plain torch raises."""
    x, said = torch.ones(3, requires_grad=True), r"saved for backward at version 0 is at 1"
    with pytest.raises(StateError, match=said), measure():
        y = x.exp()
        y.add_(1)
        y.sum().backward()


def test_limit_must_be_positive():
    """As text."""
    with (
        pytest.raises(OptionError, match="limit_bytes 0 is too small"),
        watch_memory(limit_bytes=0),
    ):
        pass


def test_growth_of_a_leak_is_found():
    """The place that grows, with bytes per step, and no other."""
    model, optimizer = model_and_optimizer()
    kept = []

    def leaks():
        train(model, optimizer, torch.randn(4, 8))
        kept.append(model(torch.randn(4, 8)).sum())

    with pytest.raises(AssertionError) as error:
        assert_no_growth(leaks)
    text = str(error.value)
    assert text.startswith("mod_tracker.assert_no_growth: ")
    assert "Sequential.0" in text
    assert "test_watch.py:" in text


def test_steps_that_leave_nothing_pass():
    """A training step, and one that fills a cache once."""
    model, optimizer = model_and_optimizer()
    cache = {}

    def fills():
        train(model, optimizer, torch.randn(4, 8))
        cache.setdefault("mask", torch.ones(100))

    assert_no_growth(fills)


def test_garbage_is_no_growth():
    """What only a cycle holds is collected."""

    def makes_a_cycle():
        cycle = [torch.zeros(100)]
        cycle.append(cycle)

    assert_no_growth(makes_a_cycle)


def test_growth_needs_two_steps():
    """As text."""
    with pytest.raises(OptionError, match="steps 1 and warmup 2 are too small"):
        assert_no_growth(lambda: None, steps=1)
