"""Units gathered by hand are shown until they are freed or used up; here in a group of one.

Unsharded parameters have another dtype than shards, so they have separate memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from flat_param import ParameterError, StateError, fully_shard

pytestmark = pytest.mark.usefixtures("group_of_one")
PRECISE = MixedPrecisionPolicy(param_dtype=torch.float64)


def _layer() -> nn.Module:
    return fully_shard(nn.Linear(4, 3), mp_policy=PRECISE)


def _x() -> Tensor:
    return torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)


def _is_free(layer: nn.Module) -> bool:
    """Whether the optimizer's parameters are shown, not the unit's of another dtype."""
    return all(param.dtype == torch.float32 for param in layer.parameters())


def test_wait_shows_once() -> None:
    """Before it pieces are shown, after a second one the same tensors."""
    layer = _layer()
    handle = layer.unshard(async_op=True)
    assert layer.weight.dtype == torch.float32
    handle.wait()
    weight = layer.weight
    assert weight.dtype == torch.float64
    handle.wait()
    assert layer.weight is weight


@pytest.mark.parametrize("use", ["reshard", "forward", "state_dict"])
def test_wait_does_nothing_once_the_gather_is_used_up(use: str) -> None:
    """An old handle gathers nothing, and shows nothing that is stale."""
    layer = _layer()
    handle = layer.unshard(async_op=True)
    {"reshard": layer.reshard, "forward": lambda: layer(_x()), "state_dict": layer.state_dict}[
        use
    ]()
    handle.wait()
    assert _is_free(layer)


def test_optimizer_made_while_unsharded_is_refused() -> None:
    """It would step a copy; one made after `reshard` trains."""
    layer = _layer()
    layer.unshard()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer.reshard()
    layer(_x()).sum().backward()
    with pytest.raises(ParameterError, match=r"was unsharded, so it would step a copy"):
        optimizer.step()
    before = layer.weight.detach().clone()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert not torch.equal(layer.weight, before)


def test_second_gather_keeps_what_is_shown() -> None:
    """The same tensors; a parameter that replaced one is dropped at the end, as with FSDP2."""
    layer = _layer()
    layer.unshard()
    weight = layer.weight
    before = layer.state_dict()["bias"].clone()
    layer.unshard()
    assert layer.weight is weight
    layer.bias = bias = nn.Parameter(torch.ones(3, dtype=torch.float64))
    layer.unshard()
    assert layer.weight is weight
    assert layer.bias is bias
    layer.reshard()
    assert torch.equal(layer.bias, before)


class Asks(nn.Module):
    """A layer that is used twice, and a moment in which to ask for something."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.ask: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        """Of both, asking between them, and in backward."""
        y: Tensor = self.inner(x)
        y = y * 1
        y.register_hook(lambda _: self.ask())
        self.ask()
        return self.last(y) + self.last.bias


class Chain(Asks):
    """The layers one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        """Asks where the last one has all it needs, in backward."""
        y = self.inner(x)
        y.register_hook(lambda _: self.ask())
        self.ask()
        z: Tensor = self.last(y * 1)
        return z


def test_unit_that_computes_is_whole_and_is_not_freed() -> None:
    """Asking for it does nothing; freeing it is refused by its name and the pass's."""
    model = fully_shard(Asks(), mp_policy=PRECISE)
    texts = []

    def ask() -> None:
        leaf = model.last.weight
        assert model.unshard(async_op=True) is not None
        assert model.unshard() is None
        assert model.last.weight is leaf
        with pytest.raises(StateError) as raised:
            model.reshard()
        texts.append(str(raised.value))

    model.ask = ask
    model(_x()).sum().backward()
    assert texts == [
        f"flat_param.reshard: the outermost unit is in the {phase} that runs, but that computes "
        "with whole parameters and frees them itself. Call it after the pass."
        for phase in ("forward", "backward")
    ]


def test_inner_unit_is_named_and_others_may_be_freed() -> None:
    """One that backward is done with, and one that it has not come to, where it says so."""
    model = Chain()
    for layer in (model.inner, model.last):
        fully_shard(layer, mp_policy=PRECISE)
    model, asked = fully_shard(model, mp_policy=PRECISE), []

    def ask() -> None:
        model.last.reshard()
        asked.append(True)
        if len(asked) == 1:  # in forward
            model.inner.reshard()
            return
        text = "flat_param.reshard: unit 'inner' is in the backward that runs, but that computes"
        with pytest.raises(StateError, match=re.escape(text)):
            model.inner.reshard()

    x = _x().requires_grad_()
    model.ask = ask
    model(x).sum().backward()
    assert len(asked) == 2
    weights = [layer.weight.double() for layer in (model.last, model.inner)]
    assert torch.allclose(x.grad, torch.ones(2, 4).double() @ weights[0] @ weights[1])


@pytest.mark.parametrize("use", ["unshard", "reshard", "whole_params"])
def test_what_was_stopped_is_settled_first(use: str) -> None:
    """A backward that failed: parameters can be gathered, freed and made whole at once."""
    model = fully_shard(Asks(), mp_policy=PRECISE)
    y = model(_x())
    model.ask = lambda: 1 // 0  # type: ignore[assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    model.ask = lambda: None
    if use == "whole_params":
        with model.whole_params():
            assert model.last.weight.dtype == torch.float32
            assert model.last.weight.shape == (4, 4)
    elif use == "reshard":
        model.reshard()
    model.unshard()
    assert model.last.weight.dtype == torch.float64
    model.reshard()
    assert _is_free(model)
