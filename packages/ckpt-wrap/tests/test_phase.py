"""A forward can ask which of its runs it is in; the answer is that of its own thread."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from ckpt_wrap import CheckpointImpl, checkpoint_, is_checkpointing, is_recomputing
from ckpt_wrap._phase import FirstRun, SecondRun


def test_is_recomputing_only_while_recomputing(wrap):
    """False in forward, True in the second run, False again after."""

    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.seen = []

        def forward(self, x):
            self.seen.append(is_recomputing())
            return torch.tanh(self.linear(x))

    module = wrap(Watch())
    module(torch.randn(1, 2, requires_grad=True)).sum().backward()
    assert module.seen == [False, True]
    assert not is_recomputing()


@pytest.mark.parametrize("impl", CheckpointImpl)
def test_is_checkpointing_in_both_runs_and_nowhere_else(impl):
    """Before, between, after, without gradients, and after a forward that failed: False."""
    seen, bad = [], [False]

    class Watch(nn.Linear):
        def forward(self, x):
            seen.append(is_checkpointing())
            if bad[0]:
                raise ValueError
            return torch.tanh(super().forward(x))

    module = checkpoint_(Watch(2, 2), checkpoint_impl=impl)
    loss = module(torch.randn(1, 2, requires_grad=True)).sum()
    assert (seen, is_checkpointing()) == ([True], False)
    loss.backward()
    assert (seen, is_checkpointing()) == ([True, True], False)
    with torch.no_grad():
        module(torch.randn(1, 2))
    assert seen == [True, True, False]
    bad[0] = True
    with pytest.raises(ValueError):
        module(torch.randn(1, 2, requires_grad=True))
    assert (seen[-1], is_checkpointing()) == (True, False)


class Note:
    """Notes of which modules it was told."""

    def __init__(self) -> None:
        self.told: list[nn.Module] = []

    def asked(self, module):
        self.told.append(module)


class Asks(nn.Module):
    """Asks itself, by a function, or by another module."""

    def forward(self, how):
        return _ask() if how == "function" else is_recomputing()


def _ask():
    return is_recomputing()


@pytest.mark.parametrize("how", ["itself", "function"])
def test_all_runs_are_told_which_module_asks(how):
    """The innermost first; the module is the nearest whose method it is."""
    outer, inner, module = Note(), Note(), Asks()
    with FirstRun(outer), FirstRun(inner):
        assert not module.forward(how)
    assert outer.told == inner.told == [module]
    module.forward(how)
    assert outer.told == [module]


def test_nobody_is_told_of_a_question_outside_of_modules():
    """There is no module whose buffers it could be about."""
    note = Note()

    class Plain:
        def ask(self):
            return is_recomputing()

    with FirstRun(note):
        # Frames of this test and of pytest, whose `self` is no module, are looked through.
        assert not Plain().ask()
    assert note.told == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_ends_whichever_way(fails):
    """Nested in one another, the outer goes on where the inner ended."""
    with FirstRun(Note()):
        error = pytest.raises(ValueError, match="told to") if fails else nullcontext()
        with error, SecondRun(Note()):
            assert is_recomputing()
            if fails:
                raise ValueError("told to")
        assert not is_recomputing()
        assert is_checkpointing()
    assert not is_checkpointing()


def test_a_first_run_inside_a_second_is_recomputing():
    """A nested region runs for the first time, but it is not the first time for its forward."""
    with SecondRun(Note()), FirstRun(Note()):
        assert is_recomputing()
        assert is_checkpointing()


def test_another_thread_is_in_no_run():
    """What it saves is kept."""
    seen = []
    with SecondRun(Note()):
        thread = threading.Thread(
            target=lambda: seen.append((is_recomputing(), is_checkpointing()))
        )
        thread.start()
        thread.join()
    assert seen == [(False, False)]


def test_compiled_code_is_the_same_in_both_runs():
    """So it is told that it is the first, and nobody is told that it asked."""
    note = Note()
    compiled = torch.compile(Asks(), backend="eager", fullgraph=True)
    with SecondRun(note):
        assert not compiled("itself")
    assert note.told == []
