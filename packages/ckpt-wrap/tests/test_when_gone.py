"""Actions for collected objects run, wherever Ctrl-C lands."""

from __future__ import annotations

import contextlib
import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt_wrap
from ckpt_wrap import offload_, offload_stats
from ckpt_wrap.offload import _when_gone
from ckpt_wrap.offload._when_gone import do_due, when_gone

OFFLOAD = str(Path(ckpt_wrap.__file__).parent)


class Owner:
    """Something that can go."""


class Interrupt:
    """While entered, raises KeyboardInterrupt before the n-th line or call in this package."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __enter__(self) -> Interrupt:
        self.before = sys.gettrace(), sys.unraisablehook
        sys.unraisablehook = lambda _: None  # where finalizers' exceptions are told
        sys.settrace(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self.before[0])
        sys.unraisablehook = self.before[1]

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(OFFLOAD) or self.seen == self.at:
            return None
        if event in ("call", "line"):
            self.seen += 1
            if self.seen == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def test_it_runs_at_once_and_nothing_stays():
    """One action for each owner, when it goes; of another that goes later, later."""
    done, first, second = [], Owner(), Owner()
    before = len(_when_gone._actions)
    when_gone(first, lambda: done.append(1))
    when_gone(second, lambda: done.append(2))
    del first
    assert done == [1]
    del second
    assert done == [1, 2]
    assert (len(_when_gone._actions), len(_when_gone._due)) == (before, 0)


def test_an_interrupt_anywhere_puts_it_off_at_most():
    """What Ctrl-C kept from being done is done by whoever looks next."""
    for at in range(1, 100):
        done, owner = [], Owner()
        when_gone(owner, lambda done=done: done.append(1))
        with Interrupt(at) as interrupt:
            del owner
        do_due()
        assert done
        assert not _when_gone._due
        if interrupt.seen < at:
            break
    assert 5 < at < 99


def test_an_action_that_fails_is_not_tried_again():
    """Its exception goes where those of finalizers go, and the others have their turn."""
    tried, owner, told, before = [], Owner(), [], sys.unraisablehook

    def fails():
        tried.append(1)
        raise ValueError("on purpose")

    when_gone(owner, fails)
    sys.unraisablehook = lambda found: told.append(found.exc_type)
    try:
        del owner
    finally:
        sys.unraisablehook = before
    do_due()
    assert (tried, told) == ([1], [ValueError])


@pytest.mark.slow
def test_an_interrupt_anywhere_in_a_step_leaves_no_file(tmp_path):
    """At every line of this package in forward and backward; after the next step nothing is left.

    A file is written after it has an owner, and so goes with it.
    """
    module = offload_(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), to=tmp_path, min_bytes=1)
    x = torch.ones(2, 4, requires_grad=True)

    def step():
        module(x).sum().backward()

    def interrupted():
        for at in range(1, 3000):
            with Interrupt(at) as interrupt, contextlib.suppress(KeyboardInterrupt):
                step()
            step()
            if any(tmp_path.rglob("*.bin")):
                gc.collect()  # a graph that was stopped may be a circle
            assert not list(tmp_path.rglob("*.bin")), at
            assert offload_stats(module).bytes_away == 0, at
            if interrupt.seen < at:
                break
        return at

    # An interrupt at the end of a `with` leaves hooks on saved tensors behind, in this thread.
    with ThreadPoolExecutor(1) as thread:
        at = thread.submit(interrupted).result()
    assert 100 < at < 2999
