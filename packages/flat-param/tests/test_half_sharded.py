"""A module whose sharding was stopped half-way is of no use, and says so at every use."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from flat_param import StateError, fully_shard
from flat_param.sharded._by_hand import units_at_rest, units_below
from flat_param.sharded._half_sharded import HalfShardedModule, half_sharded
from flat_param.sharded._sharded_params import ShardedParams

pytestmark = pytest.mark.usefixtures("group_of_one")
TEXT = (
    "flat_param.fully_shard: Linear was only partly sharded when it was interrupted, but a rank "
    "cannot put its pieces back together. Build the module again on every rank, and shard that."
)


def _half() -> nn.Module:
    module = nn.Linear(3, 2)
    module.__class__ = half_sharded(nn.Linear)
    return module


def test_class_is_a_subclass_that_names_what_it_was() -> None:
    """So that `isinstance` and messages go on telling the truth."""
    cls = half_sharded(nn.Linear)
    assert cls.__name__ == "HalfShardedLinear"
    assert issubclass(cls, nn.Linear)
    assert issubclass(cls, HalfShardedModule)
    assert half_sharded(nn.Linear) is not cls


USES: dict[str, Callable[[nn.Module], object]] = {
    "call": lambda module: module(torch.ones(3)),
    "state_dict": lambda module: module.state_dict(),
    "state_dict_around": lambda module: nn.Sequential(nn.ReLU(), module).state_dict(),
    "load": lambda module: module.load_state_dict(nn.Linear(3, 2).state_dict()),
    "load_around": lambda module: nn.Sequential(module).load_state_dict({}, strict=False),
    "call_around": lambda module: nn.Sequential(module)(torch.ones(3)),
    "units_below": lambda module: list(units_below(nn.Sequential(module))),
    "units_at_rest": lambda module: units_at_rest(module),
    "shard_again": lambda module: fully_shard(module),
    "shard_around": lambda module: fully_shard(nn.Sequential(module)),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_is_refused_with_what_to_do(use: Callable[[nn.Module], object]) -> None:
    """Its own, and those of a module around it; nothing is computed from pieces."""
    with pytest.raises(StateError, match=re.escape(TEXT)):
        use(_half())


def test_module_stopped_after_its_first_cut_is_half_sharded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C in the second segment: the first one's weights are gone, and no forward pretends."""
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).bfloat16())
    make = ShardedParams._make_full

    def stops(part: ShardedParams) -> None:
        if part.shard.dtype == torch.bfloat16:
            raise KeyboardInterrupt
        make(part)

    monkeypatch.setattr(ShardedParams, "_make_full", stops)
    with pytest.raises(KeyboardInterrupt):
        fully_shard(module)
    assert isinstance(module, HalfShardedModule)
    assert isinstance(module, nn.Sequential)
    monkeypatch.undo()
    with pytest.raises(StateError, match="Sequential was only partly sharded"):
        module(torch.ones(3))
    with pytest.raises(StateError, match="Sequential was only partly sharded"):
        fully_shard(module)


def test_module_stopped_before_its_first_cut_is_what_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It computes, and can be sharded."""
    module = nn.Linear(3, 2)
    expected = module(torch.ones(3))

    def stops(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ShardedParams, "_move_into_shard", stops)
    with pytest.raises(KeyboardInterrupt):
        fully_shard(module)
    monkeypatch.undo()
    assert type(module) is nn.Linear
    assert torch.equal(module(torch.ones(3)), expected)
    assert torch.equal(fully_shard(module)(torch.ones(3)), expected)
