"""Which parameters are stepped together, and how much state is in memory meanwhile."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from flat_param import StateError, flatten, offload_optimizer

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


class CountingItself(SGD):
    """Keeps a count on itself."""

    count = 1000

    def step(self, closure: Any = None) -> Any:
        """Step, and count it."""
        self.count = self.count + 1
        return super().step(closure)


def test_optimizer_that_counts_is_refused() -> None:
    """Its count would be one of buckets."""
    text = (
        " changes 'count' of itself or of its parameter group in a step, but it steps once per "
        "bucket. Use it as it is."
    )
    for kind in (Counting, CountingItself):
        optimizer = offload_optimizer(kind(_params(2, 2), lr=1.0))
        with pytest.raises(StateError, match=re.escape(kind.__name__ + text)):
            optimizer.step()


def _in_use() -> int:
    """Bytes that the C library has handed out and not got back."""

    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]

    call = ctypes.CDLL(None).mallinfo2
    call.restype = Info
    info = call()
    return int(info.h + info.d)  # uordblks in heaps, and hblkhd in separate maps


class Measured(AdamW):
    """Notes what is in use while a bucket has stepped."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.seen = list[int]()

    def step(self, closure: Any = None) -> Any:
        """Step, and note it."""
        found = super().step(closure)
        self.seen.append(_in_use())
        return found


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries do not tell")
@pytest.mark.parametrize("flat", [False, True])
def test_state_of_one_bucket_is_in_memory(flat: bool, tmp_path: Path) -> None:
    """By the allocator: AdamW's two tensors for one of eight buckets."""
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
    of_state = 2 * 4 * NUMEL
    for _ in range(3):
        gc.collect()
        before, optimizer.seen = _in_use(), []
        optimizer.step()
        assert len(optimizer.seen) == 8
        assert all(abs(seen - before - of_state) < of_state // 8 for seen in optimizer.seen)
        assert abs(_in_use() - before) < of_state // 8  # nothing stays
