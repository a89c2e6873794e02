"""Who holds the memory: on one page, when asked, above a limit, and when memory runs out."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from mod_tracker import OptionError, StateError, profile_memory, watch_memory


def test_page_is_written_above_a_limit(model_and_optimizer, caplog):
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
def test_page_is_written_when_memory_runs_out(model_and_optimizer, error):
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


def test_a_batch_like_no_other_is_looked_at(model_and_optimizer, train):
    """A bad batch after many good ones is on the page with the lines that made it."""
    model, optimizer = model_and_optimizer()
    with watch_memory(model, optimizer=optimizer) as watch:
        for _ in range(7):
            train(model, optimizer, torch.randn(4, 8))
        loss = model(torch.randn(5000, 8)).sum()
        page = watch.page()
    assert page.steps == (8, 5)
    assert page.held[0].line.startswith("conftest.py:")  # where the model is written
    assert page.by_kind()["saved"] > 5000 * 2 * 32 * 4
    assert loss.requires_grad


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


def test_watching_changes_no_bit(model_and_optimizer, train):
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
