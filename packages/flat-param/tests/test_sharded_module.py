"""What a sharded module can do beyond its own class, in a group of one."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flat_param import MixedPrecision, ShardedModule, StateError, fully_shard

pytestmark = pytest.mark.usefixtures("group_of_one")
PRECISE = MixedPrecision(param_dtype=torch.float64)


def _pair() -> nn.Module:
    """Two units in one around them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for index in (0, 1):
        fully_shard(model[index], mixed_precision=PRECISE)
    return fully_shard(model, mixed_precision=PRECISE)


def _x() -> Tensor:
    return torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)


WRONG: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "one": (lambda m: m[1], "modules is one ShardedLinear, but it is a list of sharded modules"),
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
    wrong: Callable[[nn.Module], object], text: str, function: str
) -> None:
    """By the name of the function and the position in the list."""
    model = _pair()
    name = f"set_modules_to_{function}_prefetch"
    getattr(model[0], name)([model[1]])
    lists = getattr(model._flat_param.schedule.lists, function)
    before = dict(lists)
    with pytest.raises(StateError, match=re.escape(f"flat_param.{name}: {text}")):
        getattr(model[0], name)(wrong(model))
    assert lists == before


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_no_sync_ends_with_its_block(error: type[BaseException]) -> None:
    """Also by an exception, and inside of another one."""
    model = _pair()
    schedule = model._flat_param.schedule
    with model.no_sync():
        with pytest.raises(error), model.no_sync():
            raise error
        assert not schedule.sync
    assert schedule.sync


def test_copies_and_pickles_are_refused() -> None:
    """With what to do in their place."""
    model = _pair()
    with pytest.raises(StateError, match="ShardedSequential cannot be copied, but a sharded"):
        copy.deepcopy(model)
    with pytest.raises(StateError, match="ShardedSequential cannot be pickled, but a sharded"):
        pickle.dumps(model)
    assert isinstance(model, ShardedModule)
