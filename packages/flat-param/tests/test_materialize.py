"""Modules whose tensors are on meta are given memory and values, all of them or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flat_param.sharded._materialize import materialize


class Scaled(nn.Module):
    """A parameter of its own, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(3, 3)

    def reset_parameters(self) -> None:
        """Ones, as in the beginning."""
        nn.init.ones_(self.scale)


def _on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def _values(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_values_are_those_of_one_process() -> None:
    """The same numbers, drawn in the same order."""
    module = _on_meta(lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), Scaled()))
    materialize(module, device=torch.device("cpu"), init_fn=None)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), Scaled())
    found = _values(module)
    assert all(torch.equal(found[name], value) for name, value in _values(plain).items())


def test_parts_with_values_keep_them() -> None:
    """A layer that was loaded before, inside a module that is on meta."""
    module = _on_meta(Scaled)
    module.layer = layer = nn.Linear(3, 3)
    before = _values(layer)
    materialize(module, device=torch.device("cpu"), init_fn=None)
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(module.scale, torch.ones(3))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_stopped_in_the_middle_all_is_on_meta_again(error: type[BaseException]) -> None:
    """What has memory and no values yet would look initialised to the next call."""
    module = _on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)))
    before = {name: id(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}

    def stops(child: nn.Module) -> None:
        if child is module[1]:
            raise error

    with pytest.raises(error):
        materialize(module, device=torch.device("cpu"), init_fn=stops)
    state = module.state_dict(keep_vars=True)
    assert all(tensor.is_meta for tensor in state.values())
    assert {name: id(tensor) for name, tensor in state.items()} == before
    materialize(module, device=torch.device("cpu"), init_fn=None)
    assert not any(tensor.is_meta for tensor in module.state_dict().values())


def test_tied_parameters_stay_tied() -> None:
    """One parameter under two names is one afterwards."""

    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        module[1].weight = module[0].weight
        return module

    module = _on_meta(make)
    materialize(module, device=torch.device("cpu"), init_fn=None)
    assert module[1].weight is module[0].weight
    assert not module[0].weight.is_meta
