"""Which parameters are stepped together, and how much state is in memory meanwhile."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from flat_param import StateError, flatten, offload_optimizer
from flat_param.offload import _mover, _tiers

NUMEL = 512 * 512


class Noting(SGD):
    """Notes which parameters it is given at a time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.given: list[list[int]] = []

    def step(self, closure: Any = None) -> Any:
        """Step, and note it."""
        self.given.append([p.numel() for group in self.param_groups for p in group["params"]])
        return super().step(closure)


def _params(*sizes: int) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.ones(size)) for size in sizes]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def test_buckets_are_as_full_as_they_may_be() -> None:
    """In order, within a group; a larger parameter is one; those without gradient are in none."""
    first, second = _params(2, 3, 1, 9, 4, 7), _params(1, 1)
    first[-1].grad = None
    optimizer = Noting([{"params": first}, {"params": second, "lr": 0.5}], lr=0.25)
    offload_optimizer(optimizer, bucket_numel=5).step()
    assert optimizer.given == [[2, 3], [1], [9], [4], [1, 1]]
    assert [param[0].item() for param in first] == [0.75] * 5 + [1.0]
    assert [param[0].item() for param in second] == [0.5, 0.5]


def test_step_without_any_gradient_steps_nothing() -> None:
    """Not even once without parameters."""
    optimizer = Noting([nn.Parameter(torch.ones(2))], lr=1.0)
    offload_optimizer(optimizer).step()
    assert optimizer.given == []


class Counting(SGD):
    """Keeps a count in its group, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        """Step, and count it."""
        for group in self.param_groups:
            group["count"] = group.get("count", 1000) + 1
        return super().step(closure)


def test_optimizer_that_counts_in_its_groups_is_refused() -> None:
    """Its count would be one of buckets."""
    text = (
        "flat_param.offload_optimizer: OffloadedCounting changes 'count' of its parameter group "
        "in a step, but it steps once per bucket. Use it as it is."
    )
    optimizer = offload_optimizer(Counting(_params(2, 2), lr=1.0))
    with pytest.raises(StateError, match=re.escape(text)):
        optimizer.step()


def _in_use() -> int:
    """Bytes that the C library has handed out and not got back."""

    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]

    call = ctypes.CDLL(None).mallinfo2
    call.restype = Info
    info = call()
    return int(info.h + info.d)  # uordblks in its heaps, and hblkhd in maps of its own


class Measured(AdamW):
    """Notes what is in use when a bucket has stepped and the next one's state has just come."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[int] = []
        self.came, self.looked = Semaphore(0), Semaphore(0)

    def step(self, closure: Any = None) -> Any:
        """Step, and look; nothing else of this process runs then."""
        found = super().step(closure)
        assert self.came.acquire(timeout=30)
        self.seen.append(_in_use())
        self.looked.release()
        return found


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries do not tell")
@pytest.mark.parametrize("flat", [False, True])
def test_state_of_two_buckets_is_in_memory_at_most(
    flat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the allocator: AdamW's two tensors for two of eight buckets.

    Looked at where the most is there: the next bucket's state has been brought, the thread that
    brings it waits, this one's is not put away yet, and what its step needed is free again.
    """
    try:
        _in_use()
    except AttributeError:
        pytest.skip("this C library does not tell")
    model = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(8))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    params = flatten(model).chunks(NUMEL // 4) if flat else list(model.parameters())
    assert all(param.grad is not None for param in params)  # moved into the flat one here
    optimizer = Measured(params, foreach=False)
    offload_optimizer(optimizer, folder=tmp_path, bucket_numel=NUMEL)
    fetch = _mover.Mover.fetch

    def waiting(_: Any) -> None:
        optimizer.came.release()
        assert optimizer.looked.acquire(timeout=30)

    def pausing(self: Any, *args: Any) -> Any:
        found = fetch(self, *args)
        if fetches:  # nothing has stepped before the first
            found.add_done_callback(waiting)
        fetches.append(found)
        return found

    monkeypatch.setattr(_mover.Mover, "fetch", pausing)
    of_state, fetches = 2 * 4 * NUMEL, list[Any]()
    for step in range(3):
        gc.collect()
        before, optimizer.seen = _in_use(), []
        optimizer.step()
        fetches.clear()
        assert len(optimizer.seen) == 8
        most = max(optimizer.seen) - before
        held = of_state * (1 if step == 0 else 2)  # at first, there is none to bring
        assert abs(most - held) < of_state // 8
        assert abs(_in_use() - before) < of_state // 8  # nothing stays


class Waiting(SGD):
    """Waits in its step for what a test says."""

    until: Event | None = None

    def step(self, closure: Any = None) -> Any:
        """Wait, and step."""
        if self.until is not None:
            vars(self).setdefault("waited", []).append(self.until.wait(5))
        return super().step(closure)


def test_state_of_the_next_bucket_comes_while_one_is_stepped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bucket's step waits until the second one's state has come, and it comes."""
    params = _params(4, 4)
    optimizer = Waiting(params, lr=1.0, momentum=0.5)
    offload_optimizer(optimizer, folder=tmp_path, bucket_numel=4)
    optimizer.step()
    came, of_second = Event(), optimizer.state[params[1]]["momentum_buffer"]
    fetch = _mover.Mover.fetch

    def noting(self: Any, stored: Any, devices: Any) -> Any:
        found = fetch(self, stored, devices)
        if any(tensor is of_second for tensor in stored):
            found.add_done_callback(lambda _: came.set())
        return found

    monkeypatch.setattr(_mover.Mover, "fetch", noting)
    optimizer.until = came
    optimizer.step()
    assert optimizer.waited == [True, True]


def test_error_of_the_last_store_is_raised_by_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No store comes after it that would tell."""
    optimizer = SGD(_params(4), lr=1.0, momentum=0.5)
    offload_optimizer(optimizer, folder=tmp_path)
    optimizer.step()
    calls = list[Any]()

    def settle(self: Any, stored: Any) -> None:
        calls.append(stored)
        if len(calls) == 3:  # fetched for this bucket, and for none after it; stored
            raise OSError("the disk is gone")

    monkeypatch.setattr(_tiers.FolderTier, "settle", settle)
    with pytest.raises(OSError, match="the disk is gone"):
        optimizer.step()
