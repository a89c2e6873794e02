"""Offload with a byte limit, and the count of copies that backward waited for."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt_wrap

ROWS, FEATURES = 32, 64
SAVED_BYTES = 2 * ROWS * FEATURES * 4  # saved by one block


class Block(nn.Module):
    """Saves two results, each of ROWS * FEATURES numbers, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        """Run."""
        return torch.sigmoid(self.up(torch.tanh(x)))


def blocks(count):
    """A chain of blocks."""
    return nn.Sequential(*[Block() for _ in range(count)])


def given(scale=1.0):
    """An input that requires grad."""
    x = torch.linspace(-scale, scale, ROWS * FEATURES).view(ROWS, FEATURES)
    return x.requires_grad_()


def gradients(model, x):
    """Gradients of the input and the parameters."""
    return [t.grad for t in (x, *model.parameters())]


@pytest.mark.parametrize("room", [0, 1, 5, 8], ids=lambda room: f"{room}-results")
def test_what_is_away_keeps_to_its_limit(tmp_path, room):
    """The limit holds some of the eight results of four blocks, in each of two steps."""
    limit = room * SAVED_BYTES // 2 + 4  # a few bytes more do not fit another result
    plain, x = blocks(4), given()
    plain(x).square().sum().backward()
    expected = gradients(plain, x)
    model = copy.deepcopy(plain)
    for block in model:
        ckpt_wrap.offload_(block, min_bytes=1, max_bytes_away=limit, to=tmp_path)
    for _ in range(2):
        model.zero_grad()
        x = given()
        before = ckpt_wrap.offload_stats(model)
        loss = model(x).square().sum()
        inside = ckpt_wrap.offload_stats(model)
        assert inside.bytes_away == room * SAVED_BYTES // 2
        assert inside.copies_out - before.copies_out == room
        assert inside.kept - before.kept >= 8 - room
        loss.backward()
        del loss
        assert all(map(torch.equal, expected, gradients(model, x)))
        assert ckpt_wrap.offload_stats(model).bytes_away == 0
    assert max(ckpt_wrap.offload_stats(block).peak_bytes_away for block in model) <= limit


def test_threads_keep_to_one_limit(tmp_path):
    """Models in several threads share one limit."""
    limit, count = 5 * SAVED_BYTES // 2, 4
    models, losses = [blocks(2) for _ in range(count)], {}
    for model in models:
        for block in model:
            ckpt_wrap.offload_(block, min_bytes=1, max_bytes_away=limit, to=tmp_path)
    meet = threading.Barrier(count, timeout=60)

    def run(number):
        meet.wait()
        losses[number] = models[number](given()).sum()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(losses) == count
    assert sum(ckpt_wrap.offload_stats(model).bytes_away for model in models) == limit
    losses.clear()
    assert sum(ckpt_wrap.offload_stats(model).bytes_away for model in models) == 0


def test_copies_that_backward_waits_for_are_counted(tmp_path):
    """Of three blocks, only the copies of the last one are late."""
    model = blocks(3)
    for block in model:
        ckpt_wrap.offload_(block, min_bytes=1, to=tmp_path)
    loss = model(given()).sum()
    with torch.no_grad():  # saves nothing; finished copies are released
        model(given())
    loss.backward()
    stats = [ckpt_wrap.offload_stats(block) for block in model]
    assert [each.late for each in stats[:2]] == [0, 0]
    assert stats[2].late == stats[2].copies_in == 2
    assert [each.copies_in for each in stats[:2]] == [2, 2]
    assert ckpt_wrap.offload_stats(model).late == stats[2].late


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_bytes_away_are_zero_after_an_interrupt_anywhere(tmp_path):
    """KeyboardInterrupt at any Python call of the package, also one that frees a storage."""
    model, source = blocks(2), str(Path(ckpt_wrap.__file__).parent)
    for block in model:
        ckpt_wrap.offload_(block, min_bytes=1, max_bytes_away=1 << 20, to=tmp_path)
    model(given()).sum().backward()
    left, calls = 0, 0

    def interrupt(frame, event, arg):
        nonlocal left
        if event == "call" and frame.f_code.co_filename.startswith(source):
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt

    while left <= 0:
        calls += 1
        left = calls
        sys.settrace(interrupt)
        try:
            model(given()).sum().backward()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        gc.collect()
        assert ckpt_wrap.offload_stats(model).bytes_away == 0, calls
    assert calls > 50
