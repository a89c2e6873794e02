"""What torch's observer on CUDA tells, by a stand-in that is called as torch calls it."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from torch import nn

from mod_tracker import _torch_compat, watch_memory


class Cuda:
    """Keeps what is attached, and runs out of memory."""

    def __init__(self):
        self.waiting, self.observers = [], []

    def start(self):
        """Be used for the first time: now there is what observers can be attached to."""
        while self.waiting:
            self.waiting.pop(0)()

    def run_out(self):
        """As the allocator does: tell the observers, and then raise."""
        for observer in self.observers:
            observer(0, 3_000_000, 80_000_000, 1_000_000)
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def cuda(monkeypatch):
    """In the place of torch's."""
    made = Cuda()
    attach = made.observers.append
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", attach, raising=False)
    monkeypatch.setattr(torch.cuda, "_lazy_call", made.waiting.append)
    monkeypatch.setattr(_torch_compat, "_attached", set())
    return made


def test_observer_is_attached_once_and_when_there_is_what_to_attach_to(cuda):
    """torch cannot take one out again, and has nothing to attach to before CUDA is used."""
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


def test_an_error_of_a_listener_stays_away_from_torch(cuda, caplog):
    """torch would raise it in place of its own; the log has it."""
    caplog.set_level(logging.ERROR, "mod_tracker")
    end = _torch_compat.on_out_of_memory(lambda *of: 1 / 0)
    cuda.start()
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        cuda.run_out()
    end()
    assert "mod_tracker: memory ran out, and its page could not be written" in caplog.text


def test_page_is_of_the_moment_before_the_error(cuda):
    """With what a function held that lets go of it as the error comes through; once in a step."""

    class Held(nn.Module):
        def forward(self, x):
            held = x.new_zeros(5000)
            try:
                try:
                    cuda.run_out()
                except torch.OutOfMemoryError:  # as kernels that then try with less do
                    cuda.run_out()
            finally:
                held.untyped_storage().resize_(0)

    with pytest.raises(torch.OutOfMemoryError) as raised, watch_memory() as watch:
        cuda.start()
        Held()(torch.ones(2))
    (page,) = watch.pages
    assert page.reason == "memory ran out on cuda:0, 3 MB were asked for where 1 MB are free"
    assert page.by_kind()["temporaries"] >= 4 * 5000
    assert sys.version_info < (3, 11) or raised.value.__notes__ == [str(page)]


def test_each_step_has_a_page_of_its_own(cuda):
    """Where the error of a backward is caught, nobody else tells of it."""
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
