"""Units that gather, free and sum in order; here in a group of one, which frees and gathers, too.

Whole parameters are of another dtype than shards, so that they have a memory of their own.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from flat_param import StateError, fully_shard
from flat_param._torch_compat import at_end_of_backward
from flat_param.sharded import _schedule
from flat_param.sharded._passes import BackwardPass
from flat_param.sharded._schedule import Schedule

PRECISE = MixedPrecisionPolicy(param_dtype=torch.float64)


@pytest.fixture(autouse=True)
def _group_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _sharded(model: nn.Module, *inner: str) -> tuple[nn.Module, nn.Module]:
    """A model whose parts of these names are units, as it is one, and the plain one it computes."""
    plain = copy.deepcopy(model).double()
    for name in inner:
        fully_shard(model.get_submodule(name), mp_policy=PRECISE)
    return fully_shard(model, mp_policy=PRECISE), plain


def _train(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor | None]:
    """Gradients after a backward."""
    model.zero_grad()
    loss(model).backward()
    return {
        name: None if param.grad is None else param.grad.to(torch.float32).flatten()
        for name, param in model.named_parameters()
    }


def _same(model: nn.Module, plain: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    ours, theirs = _train(model, loss), _train(plain, loss)
    for name, expected in theirs.items():
        found = ours[name]
        if expected is None or found is None:
            assert found is None, name
            assert expected is None, name
        else:
            assert torch.equal(found, expected), name


def _x(rows: int = 3) -> Tensor:
    return torch.linspace(-1, 1, 4 * rows, dtype=torch.float64).reshape(rows, 4)


class Fails(nn.Module):
    """Raises after its layer has run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Never returns."""
        self.layer(x)
        raise ZeroDivisionError


class GoesOn(nn.Module):
    """Catches what a part of it raises, and uses another one."""

    def __init__(self) -> None:
        super().__init__()
        self.fails, self.head = Fails(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Of the other one."""
        x = self.head(x)
        try:
            self.fails(x)
        except ZeroDivisionError:
            return self.head(x)
        return x


def test_module_that_catches_an_error_of_a_part_goes_on() -> None:
    """Its own parameters are still whole, and the part's are freed."""
    model, plain = _sharded(GoesOn(), "fails")
    for _ in range(2):
        _same(model, plain, lambda m: m(_x()).square().sum())


def test_backward_that_fails_at_its_end_is_over_whoever_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread of a device may hold for a while what the engine would have called."""
    model, plain = _sharded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "0", "1")
    held: list[Callable[[], None]] = []

    def hold(callback: Callable[[], None]) -> None:
        held.append(callback)
        at_end_of_backward(callback)

    with monkeypatch.context() as broken:
        broken.setattr(_schedule, "at_end_of_backward", hold)
        broken.setattr(_schedule, "publish", lambda units: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(_x()).square().sum().backward()
    _same(model, plain, lambda m: m(_x()).square().sum())
    assert len(held) == 1


def _in_a_hook(run: Callable[[], None], x: Tensor | None = None) -> Tensor:
    """A loss in whose backward something is called."""
    with torch.enable_grad():
        middle = (torch.ones(2, requires_grad=True) if x is None else x) * 1
        middle.register_hook(lambda grad: torch.enable_grad()(run)())
        return middle.sum()


def _nested(depth: int, run: Callable[[], None]) -> None:
    for _ in range(depth):
        run = _in_a_hook(run).backward
    run()


def _in_a_thread(run: Callable[[], None]) -> None:
    """Of a hook, which waits for it."""

    def hook() -> None:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    _in_a_hook(hook).backward()


def _in_one_that_raises(run: Callable[[], None]) -> None:
    def hook() -> None:
        run()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _in_a_hook(hook).backward()


def _inside_gradients_of(run: Callable[[], None]) -> None:
    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(_in_a_hook(run, x), x)


AROUND = {
    "alone": partial(_nested, 0),
    "in a hook": partial(_nested, 1),
    "deeper": partial(_nested, 3),
    "deeper than a stack": partial(_nested, 70),  # torch has threads of its own go on from the 60th
    "in a thread of a hook": _in_a_thread,
    "in one that raises": _in_one_that_raises,
    "in autograd.grad": _inside_gradients_of,
}


@pytest.mark.parametrize("anew", [False, True], ids=["same loss", "forward"])
@pytest.mark.parametrize("given", [False, True], ids=["backward", "autograd.grad"])
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_backward_after_a_stopped_one_matches_plain(
    around: Callable[[Callable[[], None]], None],
    given: bool,
    anew: bool,
) -> None:
    """Inside another backward, too, whose end nobody waits for."""
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    model, plain = _sharded(layers, "0", "1", "2")
    hooked: list[Tensor] = []
    x = _x().requires_grad_(given)

    def stop(grad: Tensor) -> None:
        raise ZeroDivisionError

    def run() -> None:
        loss = model(x).square().sum()
        middle = hooked[0].register_hook(stop)
        with pytest.raises(ZeroDivisionError):
            if given:
                torch.autograd.grad(loss, x, retain_graph=True)
            else:
                loss.backward(retain_graph=True)
        middle.remove()
        (model(x).square().sum() if anew else loss).backward()

    model[1].register_forward_hook(lambda *call: hooked.append(call[-1]))
    around(run)
    plain(_x()).square().sum().backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.grad is not None
        assert expected.grad is not None
        assert torch.equal(param.grad.flatten(), expected.grad.float().flatten())


def test_backward_of_others_that_is_stopped_inside_a_pass_does_not_end_it() -> None:
    """A plain model's, and another sharded one's."""
    model, plain = _sharded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "0", "1")
    beside = nn.Linear(4, 4, dtype=torch.float64), _sharded(nn.Linear(4, 4))[0]

    def stop(grad: Tensor) -> None:
        raise ZeroDivisionError

    def hook(grad: Tensor) -> None:
        for other in beside:
            x = _x().requires_grad_()
            with torch.enable_grad(), pytest.raises(ZeroDivisionError):
                x.register_hook(stop)
                other(x).sum().backward()

    def watch(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(hook)

    model[0].register_forward_hook(watch)
    _same(model, plain, lambda m: m(_x()).square().sum())


class Chooses(nn.Module):
    """Runs one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, name: str) -> Tensor:
        """Of the one that is named."""
        part: nn.Module = self.get_submodule(name)
        y: Tensor = part(part(x))
        return y


def test_forwards_through_different_units_before_one_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In every step, whatever came before, the backward knows all units in their order."""
    model, plain = _sharded(Chooses(), "a", "b")
    names = {id(part._flat_param): name for name, part in model.named_modules()}
    orders: dict[int, list[str]] = {}
    begin = Schedule.begin_backward

    def begin_backward(schedule: Schedule) -> BackwardPass:
        current = begin(schedule)
        orders.setdefault(id(current), [names[id(unit)] for unit in current.units])
        kept.append(current)
        return current

    kept: list[BackwardPass] = []
    monkeypatch.setattr(Schedule, "begin_backward", begin_backward)
    for _ in range(3):
        _same(model, plain, lambda m: m(_x(), "a").square().sum() + m(_x(2), "b").square().sum())
        _same(model, plain, lambda m: m(_x(), "a").square().sum())
    assert list(orders.values()) == [["a", "b", ""], ["a", ""]] * 3


class Around(nn.Module):
    """A frozen and a trained layer, each after a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen, self.head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        x = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        y: Tensor = self.head(torch.tanh(self.second(x)))
        return y


@pytest.mark.parametrize("given", [False, True], ids=["data", "activation"])
def test_weights_around_units_stay_for_their_gradients(given: bool) -> None:
    """A unit that has all gradients of its own is still what others' gradients go through."""
    model, plain = _sharded(Around(), "first", "second")
    x = _x().requires_grad_(given)
    for _ in range(2):
        _same(model, plain, lambda m: m(x).square().sum())


def test_whole_parameters_are_freed_when_nothing_can_read_them_any_more() -> None:
    """Those around other units, too, before the backward comes to what was in front of them."""
    model, _ = _sharded(nn.Sequential(nn.Linear(4, 4), Around()), "0", "1.first", "1.second", "1")
    x, seen = _x().requires_grad_(), []
    x.register_hook(lambda grad: seen.append(model[1]._flat_param.is_unsharded))
    for _ in range(2):
        loss = model(x).square().sum()
        loss.backward()
    assert seen == [False, False]


def test_backward_of_a_forward_before_a_change_of_dtype_is_refused() -> None:
    """What it would give is of parameters that are gone."""
    model, _ = _sharded(nn.Linear(4, 4))
    loss = model(_x()).sum()
    model.to(torch.bfloat16)
    with pytest.raises(StateError, match=r"this backward belongs to a forward before \.to\(\)"):
        loss.backward()
