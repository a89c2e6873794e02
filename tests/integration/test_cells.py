"""Results of cells: equal, different by an amount, raised, crashed, timed out."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from _cells import in_process
from _models import Case
from _parts import PARTS, Part
from torch import Tensor, nn


class Block(nn.Module):
    """A layer that misbehaves in its second forward."""

    def __init__(self, habit: Any) -> None:
        super().__init__()
        self.linear, self.habit = nn.Linear(4, 4), habit

    def forward(self, x: Tensor) -> Tensor:
        return self.habit(self.linear(x).tanh())


def case_with(habit: Any) -> Case:
    """Two blocks that misbehave in one way."""
    make = lambda: nn.Sequential(Block(habit), Block(habit))  # noqa: E731
    return Case("small", "torch", make, lambda: {"input": torch.ones(2, 4)}, ("Block",))


def part(name: str) -> Part:
    return next(part for part in PARTS if part.name == name)


def fail(x: Tensor) -> Tensor:
    """Raise an error, as a model may."""
    raise ValueError("first line\nsecond line")


@pytest.mark.parametrize("each", PARTS, ids=[p.name for p in PARTS])
def test_small_model_is_equal_through_every_part(each: Part) -> None:
    """Blocks of plain torch are equal, too."""
    found = in_process(each, case_with(torch.sin))
    assert found["outcome"] == "equal", found


def test_what_differs_is_told_with_its_size() -> None:
    """A part that doubles a gradient is off by 100 %, and the kept bytes are reported."""
    twice = "model.register_forward_hook(lambda m, args, out: 2 * out)"
    found = in_process(Part("twice", "torch", twice, each_block=False), case_with(torch.sin))
    assert found["outcome"] == "differs"
    assert (found["where"], found["by"]) == ("the loss", pytest.approx(3))
    assert found["kept_bytes"] > 0


def test_gradient_that_differs_is_found_where_the_loss_is_equal() -> None:
    """The gradient that differs most is named."""
    code = "model[1].linear.bias.register_hook(lambda grad: grad / 2)"
    found = in_process(Part("halved", "torch", code, each_block=False), case_with(torch.sin))
    assert (found["outcome"], found["by"]) == ("differs", 0.5)
    assert found["where"] == "gradient of 1.linear.bias"


def test_error_crash_and_hang_are_told_apart() -> None:
    """Each outcome is reported as such, and this process survives."""
    raised = in_process(part("in place"), case_with(fail))
    assert raised["error"] == "ValueError: first line"
    crashed = in_process(part("in place"), case_with(lambda x: os._exit(3)))
    assert (crashed["outcome"], crashed["error"]) == ("crashes", "the process ended with 3")
    slow = in_process(part("in place"), case_with(lambda x: time.sleep(60)), limit_s=1)
    assert (slow["outcome"], slow["error"]) == ("takes too long", "more than 1 s")
