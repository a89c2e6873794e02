"""Behaviour in torch's own checkpoint tests, tested with ours on a model of another library."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _cases import case_of
from _checks import assert_same_grads, assert_same_step, kept_bytes, twins
from _models import Case
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ckpt_wrap import RecomputeError, checkpoint_, checkpoint_wrapper

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "in place": checkpoint_,
    "nested": checkpoint_wrapper,
}
layers = pytest.mark.parametrize("layer", list(LAYERS))
llama = pytest.mark.parametrize("case", [case_of("Llama")], ids=["Llama"])


class Tally:
    """A number in an object, which recomputation does not put back."""

    def __init__(self) -> None:
        self.number = 0


class Count(nn.Module):
    """A layer that counts its forwards."""

    def __init__(self, *, inplace: bool = False) -> None:
        super().__init__()
        self.linear, self.act, self.runs = nn.Linear(6, 6), nn.ReLU(inplace=inplace), Tally()

    def forward(self, x: Tensor) -> Tensor:
        self.runs.number += 1
        return torch.sin(self.act(self.linear(x)))


@layers
def test_one_recomputation_for_a_backward(layer: str) -> None:
    """Two outputs in one backward recompute once; an input's gradient alone also does."""
    inner = Count()
    x = torch.randn(2, 6, requires_grad=True)
    out = LAYERS[layer](inner)(x)
    (out.sum() + out.pow(2).sum()).backward()
    assert inner.runs.number == 2
    out = LAYERS[layer](Count())(x)
    assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape


@layers
def test_retained_graphs(layer: str) -> None:
    """`retain_graph=True` and a second backward: gradients are twice the plain ones."""
    plain = Count()
    module = copy.deepcopy(plain)
    for either in (LAYERS[layer](module), plain):
        out = either(torch.ones(2, 6)).sum()
        out.backward(retain_graph=True)
        out.backward()
    assert_same_grads(module, plain)


@layers
def test_double_backward(layer: str) -> None:
    """Second derivatives equal the plain model's."""
    plain = Count()
    found = []
    for either in (LAYERS[layer](copy.deepcopy(plain)), plain):
        x = torch.linspace(0, 1, 12).view(2, 6).requires_grad_()
        (first,) = torch.autograd.grad(either(x).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.pow(2).sum(), x)[0])
    assert torch.equal(*found)


@layers
def test_in_place_activations(layer: str) -> None:
    """A layer with `inplace=True` inside."""
    plain = Count(inplace=True)
    module = copy.deepcopy(plain)
    for either in (LAYERS[layer](module), plain):
        either(torch.ones(2, 6)).sum().backward()
    assert_same_grads(module, plain)


@layers
def test_other_shapes_in_the_second_run(layer: str) -> None:
    """If recomputation gives other shapes, the error names the tensor."""

    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.runs = nn.Linear(6, 6), Tally()

        def forward(self, x: Tensor) -> Tensor:
            self.runs.number += 1
            return torch.sin(self.linear(x[: 3 - self.runs.number]))

    out = LAYERS[layer](Fickle())(torch.randn(2, 6, requires_grad=True))
    with pytest.raises(RecomputeError, match="Fickle"):
        out.sum().backward()


@layers
def test_an_error_in_the_second_run(layer: str) -> None:
    """An exception in recomputation reaches the caller; the next step is right."""

    class Failing(Count):
        fail = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fail and self.runs.number == 1:
                self.runs.number += 1
                raise ZeroDivisionError("second run")
            return super().forward(x)

    plain = Failing()
    module = copy.deepcopy(plain)
    wrapped = LAYERS[layer](module)
    module.fail = True
    with pytest.raises(ZeroDivisionError, match="second run"):
        wrapped(torch.ones(2, 6)).sum().backward()
    module.fail = False
    module.zero_grad()
    for either in (wrapped, plain):
        either(torch.ones(2, 6)).sum().backward()
    assert_same_grads(module, plain)


@llama
@layers
def test_nothing_is_left_alive(case: Case, layer: str) -> None:
    """A graph is freed with its output, without garbage collection and without backward."""
    model = case.build()
    for name, block in case.blocks_of(model).items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, LAYERS[layer](block))
    case.loss(model).backward()
    gc.collect()
    gc.disable()
    try:
        for backward in (True, False):
            loss = case.loss(model)
            node = weakref.ref(loss)
            if backward:
                loss.backward()
            del loss
            assert node() is None
    finally:
        gc.enable()


@llama
def test_no_more_is_kept_than_by_torch(case: Case) -> None:
    """Live bytes after a forward, compared with torch's checkpoint around the same blocks."""
    model, other = twins(case)
    for block in case.blocks_of(model).values():
        checkpoint_(block)
    for block in case.blocks_of(other).values():

        def run(*args: Any, f: Any = block.forward, **kwargs: Any) -> Any:
            return checkpoint(f, *args, use_reentrant=False, **kwargs)

        block.forward = run  # type: ignore[method-assign]
    ours, theirs = (kept_bytes(lambda m=m: case.loss(m)) for m in (model, other))
    assert ours <= theirs


@llama
@pytest.mark.parametrize("option", ["preserve_rng_state", "early_stop", "determinism_check"])
def test_options_of_torch(case: Case, option: str) -> None:
    """Each option with its other value; without saved random state, with dropout off."""
    value: Any = "none" if option == "determinism_check" else False
    model, plain = twins(case)
    for block in case.blocks_of(model).values():
        checkpoint_(block, **{option: value})
    if option == "preserve_rng_state":
        for module in (*model.modules(), *plain.modules()):
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
    assert_same_step(case, model, plain)


@llama
@layers
def test_across_threads(case: Case, layer: str) -> None:
    """Backward in another thread gives the same gradients."""
    import threading

    model, plain = twins(case)
    for name, block in case.blocks_of(model).items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, LAYERS[layer](block))
    for either in (model, plain):
        thread = threading.Thread(target=case.loss(either).backward)
        thread.start()
        thread.join(60)
    assert_same_grads(model, plain)
