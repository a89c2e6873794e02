"""The reentrant implementation: any arguments, any result, and what it says it cannot do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ckpt_wrap import CheckpointImpl, OptionError, RecomputeError, checkpoint_, checkpoint_wrapper

REENTRANT = CheckpointImpl.REENTRANT


class Layer(nn.Module):
    """A linear layer, and what a test does with its result."""

    def __init__(self, use=torch.tanh) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.use = use

    def forward(self, *args, **kwargs):
        return self.use(self.linear(args[0]), *args[1:], **kwargs)


def given(requires_grad=True):
    """An input."""
    return torch.linspace(-1, 1, 8).view(2, 4).requires_grad_(requires_grad)


def both(use):
    """A layer and the same one, checkpointed."""
    plain = Layer(use)
    return plain, checkpoint_(copy.deepcopy(plain), checkpoint_impl=REENTRANT)


def test_a_tensor_given_twice_gets_one_gradient():
    """Added up in the order it always is, bit for bit."""
    grads = []
    for module in both(lambda y, b, c: torch.tanh(y) * b + torch.exp(c)):
        x = given()
        module(x, x, c=x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_two_tensors_of_the_same_values_are_two():
    """What makes one is that it is the same object."""
    for module in both(lambda y, b: y * b):
        x, b = given(), given()
        module(x, b).sum().backward()
        assert not torch.equal(x.grad, b.grad)


def test_parameters_are_trained_where_no_input_requires_grad():
    """Nor need there be any input at all."""
    grads = []
    for module in both(torch.tanh):
        module(given(requires_grad=False)).sum().backward()
        grads.append(module.linear.weight.grad)
    assert torch.equal(*grads)

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.ones(3))

        def forward(self):
            return torch.exp(self.rows)

    table = checkpoint_(Table(), checkpoint_impl=REENTRANT)
    table().sum().backward()
    assert torch.equal(table.rows.grad, torch.ones(3).exp())


def test_a_result_may_be_of_any_form():
    """Tensors at any depth, the same one twice, and what is no tensor."""

    def use(y):
        z = torch.tanh(y)
        return {"a": [z, (z, 3)], "b": None, "c": torch.arange(2)}

    plain, module = both(use)
    result, expected = module(given()), plain(given())
    assert torch.equal(result["a"][0], expected["a"][0])
    assert result["a"][1][1] == 3
    assert result["b"] is None
    assert torch.equal(result["c"], torch.arange(2))
    (result["a"][0].sum() + result["a"][1][0].sum()).backward()
    (2 * expected["a"][0].sum()).backward()
    assert torch.equal(module.linear.weight.grad, plain.linear.weight.grad)


def test_a_result_of_another_type_is_not_compared_on_request():
    """`determinism_check="none"` leaves it to autograd."""
    runs = []

    def use(y):
        runs.append(1)
        return torch.tanh(y).expand(2, *y.shape) if len(runs) == 1 else torch.tanh(y)

    for check in ("default", "none"):
        runs.clear()
        module = checkpoint_(Layer(use), checkpoint_impl=REENTRANT, determinism_check=check)
        loss = module(given()).sum()
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        assert isinstance(caught.value, RecomputeError) is (check == "default")


def test_an_in_place_mistake_of_the_module_is_torchs_to_explain():
    """It was not an input that changed: the second run has begun."""
    loss = checkpoint_(Layer(lambda y: torch.exp(y).add_(1)), checkpoint_impl=REENTRANT)(given())
    with pytest.raises(RuntimeError, match="output 0 of Exp") as caught:
        loss.sum().backward()
    assert not isinstance(caught.value, RecomputeError)


def test_an_input_changed_since_is_explained_after_a_backward_too():
    """Each backward is looked at by itself."""
    x = given(requires_grad=False) * 1
    loss = checkpoint_(Layer(), checkpoint_impl=REENTRANT)(x).sum()
    loss.backward(retain_graph=True)
    x.add_(1)
    with pytest.raises(RecomputeError, match="has been modified by an inplace operation"):
        loss.backward()


def test_random_numbers_are_drawn_again_unless_told_otherwise():
    """The option is that of the other implementation."""
    for preserve in (True, False):
        masks = []

        def use(y, masks=masks):
            masks.append(torch.rand(8))
            return torch.tanh(y)

        module = checkpoint_(Layer(use), checkpoint_impl=REENTRANT, preserve_rng_state=preserve)
        module(given()).sum().backward()
        assert torch.equal(*masks) is preserve


@pytest.mark.parametrize("value", [False, True])
def test_use_reentrant_chooses_the_implementation(value):
    """For both layers; options that the chosen implementation lacks are refused."""
    impl = REENTRANT if value else CheckpointImpl.NO_REENTRANT
    assert checkpoint_wrapper(nn.ReLU(), use_reentrant=value).checkpoint_impl is impl
    x = torch.ones(1, 2, requires_grad=True)
    node = checkpoint_(nn.Linear(2, 2), use_reentrant=value)(x).grad_fn
    assert ("Reentrant" in type(node).__name__) is value
    with pytest.raises(OptionError, match="'debug' is set with"):
        checkpoint_(nn.ReLU(), use_reentrant=True, debug=True)


@pytest.mark.parametrize(
    "options",
    [{"debug": False}, {"preserve_rng_state": False}, {"determinism_check": "none"}],
    ids=str,
)
def test_reentrant_takes_other_options(options):
    """Among them `debug` where it is off."""
    checkpoint_(nn.Linear(4, 4), checkpoint_impl=REENTRANT, **options)(given()).sum().backward()
