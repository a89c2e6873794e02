"""Modifying a parameter in place between forward and recomputation is an error."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.func import functional_call

from ckpt_wrap import RecomputeError, checkpoint_, checkpoint_wrapper


class TwoLinears(nn.Module):
    """Two linear layers: each weight is needed for the gradient of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.down(torch.tanh(self.up(x))))


def given():
    """An input that requires grad."""
    return torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()


def change(module, name="up.weight"):
    """Double a parameter in place, below any wrapper around the module."""
    with torch.no_grad():
        dict(module.named_parameters())[name].mul_(2)


def assert_refused(loss, name="up.weight"):
    """Assert that backward names the changed parameter."""
    with pytest.raises(RecomputeError, match=f"parameter '{re.escape(name)}' of module"):
        loss.backward()


def test_a_parameter_changed_since_forward_is_named(wrap):
    """The error says why, and what to do."""
    module = wrap(TwoLinears())
    loss = module(given()).sum()
    change(module)
    with pytest.raises(RecomputeError) as caught:
        loss.backward()
    assert str(caught.value) == (
        "ckpt_wrap.checkpoint_: parameter 'up.weight' of module TwoLinears was changed "
        "in place since its forward started, and recomputation with other values gives another "
        "gradient. Step the optimizer after backward, and do not checkpoint a module whose forward "
        "writes its parameters, such as nn.Embedding with max_norm."
    )


def step_in_backward(module):
    """Modify each parameter in its post-accumulate-grad hook."""

    def step(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return module


@pytest.mark.parametrize("how", ["blocks", "nested", "shared weight"])
def test_optimizers_may_step_in_backward(wrap, how):
    """A weight changes after its gradient is ready, so after every recomputation that reads it."""
    plain = nn.Sequential(*[TwoLinears() for _ in range(3)])
    if how == "shared weight":
        plain[1].up.weight = plain[0].up.weight
    wrapped = copy.deepcopy(plain)
    for index, block in enumerate(wrapped):
        wrapped[index] = wrap(block)
    if how == "nested":
        checkpoint_(wrapped)
    for module in (step_in_backward(plain), step_in_backward(wrapped)):
        for _ in range(3):
            module(given()).sum().backward()
    assert all(map(torch.equal, plain.parameters(), wrapped.parameters()))


def test_names_are_those_of_the_plain_model(wrap):
    """Names in the error do not include wrappers below the module."""
    model = nn.Sequential(wrap(TwoLinears()))
    wrapped = checkpoint_wrapper(model)
    loss = wrapped(given()).sum()
    change(model[0])
    assert_refused(loss, "0.up.weight")


@pytest.mark.parametrize("nested", [False, True])
def test_a_parameter_that_forward_writes_is_refused(wrap, nested):
    """Recomputation would write the parameter again."""
    embedding = nn.Embedding(4, 8, max_norm=0.5)
    module = wrap(nn.Sequential(wrap(embedding) if nested else embedding, nn.Tanh()))
    assert_refused(module(torch.arange(4)).sum(), "0.weight")


def test_other_memory_for_the_same_tensor_is_not_compared(wrap):
    """Sharding replaces a parameter's memory without changing its version."""
    module = wrap(TwoLinears())
    loss = module(given()).sum()
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    loss.backward()


def test_the_modules_own_may_change_where_functional_call_gave_others(wrap):
    """Recomputation uses the tensors substituted by `functional_call`."""
    module = wrap(TwoLinears())
    given_weights = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    loss = functional_call(module, given_weights, (given(),)).sum()
    for name in given_weights:
        change(module, name)
    loss.backward()
    assert all(weight.grad is not None for weight in given_weights.values())


def test_frozen_weights_given_by_functional_call_are_refused(wrap):
    """They are inputs of the call."""
    module = wrap(TwoLinears())
    frozen = {n: p.detach().clone() for n, p in module.named_parameters()}
    loss = functional_call(module, frozen, (given(),)).sum()
    frozen["up.weight"].mul_(2)
    with pytest.raises(RecomputeError, match="has been modified by an inplace operation"):
        loss.backward()


def test_parameters_of_inference_mode_are_not_compared(wrap):
    """Inference tensors have no version; other parameters are still compared."""
    with torch.inference_mode():
        frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    class Scaled(TwoLinears):
        def forward(self, x):
            return super().forward(x) + self.frozen.sum().item()

    inner = Scaled()
    inner.frozen = frozen
    module = wrap(inner)
    module(given()).sum().backward()
    loss = module(given()).sum()
    change(module)
    assert_refused(loss)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_parameters_of_scripted_layers_are_compared(wrap):
    """They are compared, although TorchScript stores them outside of the Python module."""
    module = wrap(nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.Tanh()))
    module(given()).sum().backward()
    loss = module(given()).sum()
    change(module, "0.weight")
    assert_refused(loss, "0.weight")
