"""What is said of units after `fully_shard`, in a group of one."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from flat_param import StateError, fully_shard

pytestmark = pytest.mark.usefixtures("group_of_one")


WRONG: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "one": (
        lambda m: m[1],
        "modules is one ShardedLinear, but it must be a list of sharded",
    ),
    "plain": (lambda m: [m[1], m[2]], "modules[1] is a Linear that is not sharded"),
    "itself": (lambda m: [m[0]], "modules[0] is a ShardedLinear that is this unit itself"),
    "foreign": (
        lambda m: [fully_shard(nn.Linear(2, 2))],
        "modules[0] is a ShardedLinear that is of another tree",
    ),
}


@pytest.mark.parametrize("function", ["forward", "backward"])
@pytest.mark.parametrize(("wrong", "text"), WRONG.values(), ids=WRONG)
def test_wrong_lists_are_refused_and_leave_the_old_one(
    wrong: Callable[[nn.Module], object], text: str, function: str, pair: nn.Module
) -> None:
    """By the name of the function and the position in the list."""
    name = f"set_modules_to_{function}_prefetch"
    getattr(pair[0], name)([pair[1]])
    lists = getattr(pair._flat_param.schedule.lists, function)
    before = dict(lists)
    with pytest.raises(StateError, match=re.escape(f"flat_param.{name}: {text}")):
        getattr(pair[0], name)(wrong(pair))
    assert lists == before


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("pins", [True, False])
def test_what_is_offloaded_is_page_locked_unless_it_is_said(pins: bool) -> None:
    """Shards and gradients, after a change of dtype too; training is the plain module's."""
    device = torch.accelerator.current_accelerator()
    plain = nn.Linear(4, 3)
    model = fully_shard(copy.deepcopy(plain), cpu_offload=True, device=device, pin_memory=pins)
    for dtype in (torch.float32, torch.float64):
        for module, home in ((plain, torch.device("cpu")), (model, device)):
            module.to(dtype)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                module(torch.ones(2, 4, dtype=dtype, device=home)).square().sum().backward()
                optimizer.step()
        for param, same in zip(model.parameters(), plain.parameters(), strict=True):
            assert param.grad is not None
            assert param.is_pinned() is param.grad.is_pinned() is pins
            torch.testing.assert_close(param, same)
