"""`watch_memory`: the page on request, above a limit, and when memory runs out."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from torch import nn

from mod_tracker import _torch_compat, profile_memory, trace, watch_memory

from ._small import shows_saved


@shows_saved
def test_page_is_written_above_a_limit(model_and_optimizer, caplog):
    model, _ = model_and_optimizer()
    caplog.set_level(logging.WARNING, "mod_tracker")
    with watch_memory(model, limit_bytes=1_500_000) as watch:
        model(torch.randn(4, 8))
        assert watch.pages == []
        model(torch.randn(4000, 8))
        model(torch.randn(4001, 8))
    assert len(watch.pages) == len(caplog.records) == 1
    assert "above the limit of 1.5 MB" in watch.pages[0].reason
    assert watch.pages[0].by_kind()["saved"] > 0


@shows_saved
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    ],
)
def test_page_is_written_when_memory_runs_out(model_and_optimizer, error):
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
    with pytest.raises(ZeroDivisionError), watch_memory() as watch:
        raise ZeroDivisionError
    assert watch.pages == []


@shows_saved
def test_storage_is_saved_until_its_last_node_is_freed():
    leaf, kinds = torch.ones(1234, requires_grad=True), []

    def kind():
        kinds.append({held.kind for held in watch.page().held if held.size == 4 * 1234})

    with watch_memory() as watch:
        y = leaf * 1  # saves neither
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


def test_changes_in_place_after_saving_are_still_an_error():
    x, said = torch.ones(3, requires_grad=True), "expected version 0"
    with pytest.raises(RuntimeError, match=said), profile_memory():
        y = x.exp()
        y.add_(1)
        y.sum().backward()


class Gradients(torch.nn.Module):
    """Computes gradients in its forward."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4))

    def forward(self, x):
        y = (x @ self.weight).tanh()
        inner = torch.func.grad(lambda w: (y.detach() @ w).sin().sum())(self.weight.detach())
        return (y * inner.sum()).sigmoid()


@pytest.mark.parametrize(
    "measure", [watch_memory, profile_memory, lambda *roots: trace(*roots, memory=True)]
)
def test_model_that_uses_torch_func_is_not_stopped(measure, x):
    model, found = Gradients(), []
    for context in (torch.enable_grad, lambda: measure(model)):
        model.zero_grad()
        with context():
            model(x).sum().backward()
        found.append(model.weight.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("measure", [watch_memory, profile_memory])
def test_second_backward_uses_the_saved_tensors(measure):
    found = []
    for context in (torch.enable_grad, measure):
        x = torch.linspace(-1, 1, 7, requires_grad=True)
        with context():
            (slope,) = torch.autograd.grad(x.tanh().exp().sum(), x, create_graph=True)
            slope.square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


class Cuda:
    """A fake CUDA that records its observers and can run out of memory."""

    def __init__(self):
        self.waiting, self.observers = [], []

    def start(self):
        """Initialize; observers can be attached from now on."""
        while self.waiting:
            self.waiting.pop(0)()

    def run_out(self):
        """Call the observers, then raise, as the allocator does."""
        for observer in self.observers:
            observer(0, 3_000_000, 80_000_000, 1_000_000)
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def cuda(monkeypatch):
    """A fake CUDA instead of torch's."""
    made = Cuda()
    attach = made.observers.append
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", attach, raising=False)
    monkeypatch.setattr(torch.cuda, "_lazy_call", made.waiting.append)
    monkeypatch.setattr(_torch_compat, "_attached", set())
    return made


def test_observer_is_attached_once_after_cuda_is_initialized(cuda):
    """torch cannot detach an observer, and none can be attached before CUDA is initialized."""
    told = []
    ends = [_torch_compat.on_out_of_memory(lambda *of: told.append(of)) for _ in range(2)]
    assert cuda.observers == []
    cuda.start()
    assert len(cuda.observers) == 1
    for end in ends:
        with pytest.raises(torch.OutOfMemoryError):
            cuda.run_out()
        end()
        end()
    with pytest.raises(torch.OutOfMemoryError):
        cuda.run_out()
    assert told == [(0, 3_000_000, 1_000_000)] * 3


def test_error_of_the_observer_does_not_replace_torchs(cuda, caplog):
    caplog.set_level(logging.ERROR, "mod_tracker")
    end = _torch_compat.on_out_of_memory(lambda *of: 1 / 0)
    cuda.start()
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        cuda.run_out()
    end()
    assert "the page on memory that ran out could not be written" in caplog.text


def test_page_is_written_before_the_error(cuda):

    class Held(nn.Module):
        def forward(self, x):
            held = x.new_zeros(5000)
            try:
                try:
                    cuda.run_out()
                except torch.OutOfMemoryError:  # as code that retries with less memory does
                    cuda.run_out()
            finally:
                held.untyped_storage().resize_(0)

    with pytest.raises(torch.OutOfMemoryError) as raised, watch_memory() as watch:
        cuda.start()
        Held()(torch.ones(2))
    (page,) = watch.pages
    assert page.reason == "memory ran out on cuda:0, 3 MB requested, 1 MB free"
    assert page.by_kind()["temporaries"] >= 4 * 5000
    assert sys.version_info < (3, 11) or raised.value.__notes__ == [str(page)]


def test_each_step_has_a_page_of_its_own(cuda):
    leaf = torch.ones(2, requires_grad=True)
    model = nn.Identity()
    with watch_memory() as watch:
        cuda.start()
        for _ in range(2):
            output = model(leaf * 1)
            output.register_hook(lambda grad: cuda.run_out())
            with pytest.raises(torch.OutOfMemoryError):
                output.sum().backward()
    assert len(watch.pages) == 2
