"""What is said of units after `fully_shard`, in a group of one."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from flat_param import StateError, fully_shard

pytestmark = pytest.mark.usefixtures("group_of_one")


WRONG: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "one": (
        lambda m: m[1],
        "modules is one ShardedLinear, but it must be a list of sharded",
    ),
    "nothing": (lambda _: None, "modules is one NoneType, but it must be a list of sharded"),
    "plain": (lambda m: [m[1], m[2]], "modules[1], of type Linear, is not sharded"),
    "itself": (lambda m: [m[0]], "modules[0], of type ShardedLinear, is this unit itself"),
    "foreign": (
        lambda m: [fully_shard(nn.Linear(2, 2))],
        "modules[0], of type ShardedLinear, is of another tree",
    ),
}


@pytest.mark.parametrize("function", ["forward", "backward"])
@pytest.mark.parametrize(("wrong", "text"), WRONG.values(), ids=WRONG)
def test_wrong_lists_are_refused_by_name(
    wrong: Callable[[nn.Module], object], text: str, function: str, pair: nn.Module
) -> None:
    """By the name of the function and the position in the list."""
    name = f"set_modules_to_{function}_prefetch"
    with pytest.raises(StateError, match=re.escape(f"flat_param.{name}: {text}")):
        getattr(pair[0], name)(wrong(pair))


@pytest.mark.parametrize("listed", [list, tuple, iter, nn.ModuleList])
@pytest.mark.parametrize("function", ["forward", "backward"])
def test_units_may_be_listed_in_any_way(
    listed: Callable[[list[nn.Module]], object], function: str, pair: nn.Module
) -> None:
    """As the model has them; a list may be emptied."""
    say = getattr(pair[0], f"set_modules_to_{function}_prefetch")
    say(listed([pair[1]]))
    say([])
    pair(torch.ones(2, 4, dtype=torch.float64)).sum().backward()


CHOICES = (
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reshard_after_backward",
    "unshard",
)


@pytest.mark.parametrize("function", CHOICES)
@pytest.mark.parametrize("value", ["no", 2, 0.5, [], torch.tensor([True, False])])
def test_what_is_neither_yes_nor_no_is_refused(
    function: str, value: object, pair: nn.Module
) -> None:
    """Python takes most words for yes."""
    text = f"flat_param.{function}: it is told {value!r}, but every rank"
    with pytest.raises(StateError, match=re.escape(text)):
        getattr(pair, function)(value)


@pytest.mark.parametrize("value", [True, 1, np.True_])
def test_what_equals_a_choice_is_one(value: Any, pair: nn.Module) -> None:
    """As a comparison of numpy's numbers gives it."""
    pair.set_requires_gradient_sync(False)
    pair.set_requires_gradient_sync(value)
    pair(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert all(param.grad is not None for param in pair.parameters())


@pytest.mark.parametrize("value", ["no", None, 0.5, torch.tensor(1)])
def test_freeing_after_forward_is_a_choice_or_a_number(value: Any, pair: nn.Module) -> None:
    """Anything else is refused."""
    text = f"the outermost unit is told {value!r}, but it is freed after forward"
    with pytest.raises(StateError, match=re.escape(text)):
        pair.set_reshard_after_forward(value)


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("pins", [True, False])
def test_what_is_offloaded_is_page_locked_unless_it_is_said(pins: bool) -> None:
    """Shards and gradients, after a change of dtype too; training is the plain module's."""
    device = torch.accelerator.current_accelerator()
    mesh = init_device_mesh(device.type, (1,))
    plain = nn.Linear(4, 3)
    policy = CPUOffloadPolicy(pin_memory=pins)
    model = fully_shard(copy.deepcopy(plain), offload_policy=policy, mesh=mesh)
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
