"""Units that gather, free and sum in order; here in a group of one, which frees and gathers, too.

Unsharded parameters have another dtype than shards, so they have separate memory.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from flat_param import StateError, fully_shard

pytestmark = pytest.mark.usefixtures("group_of_one")
PRECISE = MixedPrecisionPolicy(param_dtype=torch.float64)


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


def _same_grads(model: nn.Module, plain: nn.Module) -> None:
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.grad is not None
        assert expected.grad is not None
        assert torch.equal(param.grad.flatten(), expected.grad.float().flatten())


def _x(rows: int = 3) -> Tensor:
    return torch.linspace(-1, 1, 4 * rows, dtype=torch.float64).reshape(rows, 4)


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
    "deeper than a stack": partial(_nested, 70),  # from 60 on in other threads
    "in a thread of a hook": _in_a_thread,
    "in one that raises": _in_one_that_raises,
    "in autograd.grad": _inside_gradients_of,
}


@pytest.mark.parametrize("given", [False, True], ids=["backward", "autograd.grad"])
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_backward_after_a_stopped_one_matches_plain(
    around: Callable[[Callable[[], None]], None],
    given: bool,
) -> None:
    """Also inside another backward, which may end later."""
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
        model(x).square().sum().backward()

    model[1].register_forward_hook(lambda *call: hooked.append(call[-1]))
    around(run)
    plain(_x()).square().sum().backward()
    _same_grads(model, plain)


@pytest.mark.parametrize("older", [False, True])
def test_second_backward_after_a_stopped_one(older: bool) -> None:
    """The same graph gives the plain gradients; it is refused while older gradients are there."""
    model, plain = _sharded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "0", "1")
    if older:
        model(_x()).sum().backward()
    hooked: list[Tensor] = []
    model[0].register_forward_hook(lambda *call: hooked.append(call[-1]))
    loss = model(_x()).square().sum()
    stop = hooked[0].register_hook(lambda grad: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    stop.remove()
    if older:
        with pytest.raises(StateError, match="an exception stopped the last backward"):
            loss.backward(retain_graph=True)
        model.zero_grad()
    loss.backward()
    plain(_x()).square().sum().backward()
    _same_grads(model, plain)


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


def test_forwards_through_different_units_before_one_backward() -> None:
    """In every step, whatever came before."""
    model, plain = _sharded(Chooses(), "a", "b")
    for _ in range(3):
        _same(model, plain, lambda m: m(_x(), "a").square().sum() + m(_x(2), "b").square().sum())
        _same(model, plain, lambda m: m(_x(), "a").square().sum())


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
    """Other gradients may still need a unit whose own gradients are complete."""
    model, plain = _sharded(Around(), "first", "second")
    x = _x().requires_grad_(given)
    for _ in range(2):
        _same(model, plain, lambda m: m(x).square().sum())


def test_backward_of_a_forward_before_a_change_of_dtype_is_refused() -> None:
    """What it would give is of parameters that are gone."""
    model, _ = _sharded(nn.Linear(4, 4))
    loss = model(_x()).sum()
    model.to(torch.bfloat16)
    with pytest.raises(StateError, match=r"this backward belongs to a forward before \.to\(\)"):
        loss.backward()
