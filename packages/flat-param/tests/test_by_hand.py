"""Units gathered by hand are shown until they are freed or used up; here in a group of one.

Whole parameters are of another dtype than shards, so that they have a memory of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from flat_param import ParameterError, StateError, fully_shard
from flat_param.sharded._by_hand import units_at_rest, units_below
from flat_param.sharded._half_sharded import half_sharded
from flat_param.sharded._unit import Unit

pytestmark = pytest.mark.usefixtures("group_of_one")
PRECISE = MixedPrecisionPolicy(param_dtype=torch.float64)


def _layer() -> nn.Module:
    return fully_shard(nn.Linear(4, 3), mp_policy=PRECISE)


def _x() -> Tensor:
    return torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)


def _is_free(unit: Unit) -> bool:
    """Whether nothing of a gather by hand is left."""
    memory = sum(part.full.untyped_storage().nbytes() for part in unit.parts)
    return not (memory or unit.is_gathered or unit.is_by_hand or unit.sites.shows)


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
    assert layer.weight.dtype == torch.float32
    assert not layer._flat_param.sites.shows
    assert not layer._flat_param.is_by_hand


def _stops(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("what", ["start_gather", "take_changes", "show"])
def test_gather_that_is_stopped_leaves_the_unit_freed(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """As it begins or as it is shown; the next one is as if it had not been."""
    layer = _layer()
    unit, param = layer._flat_param, layer.weight
    monkeypatch.setattr(unit.parts[0] if what == "start_gather" else unit, what, _stops)
    with pytest.raises(KeyboardInterrupt):
        layer.unshard()
    assert _is_free(unit)
    assert layer.weight is param
    monkeypatch.undo()
    layer.unshard()
    assert torch.equal(layer.weight, param.double())


def test_wrong_value_is_refused_before_a_gather() -> None:
    """And the unit is freed."""
    layer = _layer()
    layer.weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ParameterError, match="'weight' was re-assigned"):
        layer.unshard()
    assert _is_free(layer._flat_param)


def test_second_gather_keeps_what_is_shown_and_assigned() -> None:
    """The same tensors; what was put in place of one is no reason to begin again."""
    layer = _layer()
    layer.unshard()
    weight = layer.weight
    layer.bias = bias = nn.Parameter(torch.ones(3, dtype=torch.float64))
    layer.unshard()
    assert layer.weight is weight
    assert layer.bias is bias
    layer.reshard()
    assert torch.equal(layer.bias, torch.ones(3))


@pytest.mark.parametrize("shown", [False, True])
def test_gather_after_a_step_is_of_its_values(shown: bool) -> None:
    """What was gathered before it is freed first."""
    layer = _layer()
    layer(_x()).sum().backward()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer.unshard(async_op=not shown)
    optimizer.step()
    layer.unshard()
    (part,) = layer._flat_param.parts
    assert torch.equal(layer.weight, part.params[0].double())


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
        assert not model._flat_param.is_by_hand
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
    model, freed = fully_shard(model, mp_policy=PRECISE), []

    def ask() -> None:
        model.last.reshard()
        freed.append(not model.last._flat_param.is_gathered)
        if model._flat_param.schedule.backward is None:
            model.inner.reshard()
            return
        text = "flat_param.reshard: unit 'inner' is in the backward that runs, but that computes"
        with pytest.raises(StateError, match=re.escape(text)):
            model.inner.reshard()

    x = _x().requires_grad_()
    model.ask = ask
    model(x).sum().backward()
    assert freed == [True, True]
    weights = [layer.weight.double() for layer in (model.last, model.inner)]
    assert torch.allclose(x.grad, torch.ones(2, 4).double() @ weights[0] @ weights[1])


def test_freed_units_are_gathered_ahead_in_backward() -> None:
    """As those are that a strategy frees."""
    model = Chain()
    for layer in (model.inner, model.last):
        fully_shard(layer, mp_policy=PRECISE)
    model, ahead = fully_shard(model, mp_policy=PRECISE), []
    model.set_reshard_after_forward(False)
    loss = model(_x()).sum()
    for layer in (model.inner, model.last):
        assert layer._flat_param.is_gathered
        layer.reshard()
    model.ask = lambda: ahead.append(model.inner._flat_param.is_gathered)
    loss.backward()
    assert ahead == [True]


def test_units_below_are_those_of_units_alone() -> None:
    """Not what another thing has left under the same name; half-sharded ones are refused."""
    model = nn.Sequential(_layer(), nn.Linear(2, 2), nn.Sequential(_layer()))
    object.__setattr__(model[1], "_flat_param", "mine")
    assert list(units_below(model)) == [model[0]._flat_param, model[2][0]._flat_param]
    assert list(units_below(model[1])) == []
    model[1].__class__ = half_sharded(nn.Linear)
    with pytest.raises(StateError, match="Linear was only partly sharded"):
        list(units_below(model))


def test_units_at_rest_are_freed_and_have_taken_what_was_put_there() -> None:
    """Those gathered by hand, shown or not, and those that nobody gathered."""
    model = nn.Sequential(_layer(), _layer(), _layer())
    params = list(model.parameters())
    model[0].unshard()
    model[0].weight.data = torch.full((3, 4), 2.0, dtype=torch.float64)
    model[1].unshard(async_op=True)
    model[2].weight = nn.Parameter(torch.full((3, 4), 4.0))
    units = units_at_rest(model)
    assert len(units) == 3
    assert all(_is_free(unit) for unit in units)
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert torch.equal(model[0].weight, torch.full((3, 4), 2.0))
    assert torch.equal(model[2].weight, torch.full((3, 4), 4.0))


@pytest.mark.parametrize("use", ["forward", "reshard"])
def test_what_was_stopped_is_settled_first(use: str) -> None:
    """A backward that failed: units can be gathered and freed by hand at once."""
    model = fully_shard(Asks(), mp_policy=PRECISE)
    y = model(_x())
    model.ask = lambda: 1 // 0  # type: ignore[assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    model.ask = lambda: None
    if use == "reshard":
        model.reshard()
    model.unshard()
    assert model.last.weight.dtype == torch.float64
    model.reshard()
    assert _is_free(model._flat_param)
