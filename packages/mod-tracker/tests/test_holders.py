"""Storages that are alive: as what they are held, by whom, and who made them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from mod_tracker import watch_memory
from mod_tracker._attribution import NOWHERE
from mod_tracker.reports._holders import Ledger


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


def test_page_names_the_line_that_made_a_tensor(model_and_optimizer):
    """Not torch's, and not the tracker's; with module and phase."""
    model, _ = model_and_optimizer()
    with watch_memory(model) as watch:
        output = model(torch.randn(1000, 8))
        page = watch.page()
    largest = next(held for held in page.held if held.kind != "unseen")  # torch's own tables
    assert (largest.size, largest.kind, largest.module) == (1000 * 32 * 4, "saved", "Sequential.0")
    assert (largest.phase, largest.shape) == ("forward", (1000, 32))
    assert largest.line.startswith("conftest.py:")  # where the model is written
    assert output.requires_grad


def test_what_was_made_unseen_is_found_where_python_holds_it(model_and_optimizer, train):
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
