"""A deleted model frees its memory: Python's collector finds everything that this package made."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import flat_param

X = torch.ones(2, 128)


def model() -> nn.Sequential:
    """Large parameters and small ones, whose gradients arrive by different hooks."""
    return nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 4))


def train(module: nn.Module) -> None:
    """One forward and backward."""
    module(X.to(next(module.parameters()).dtype)).sum().backward()


def flattened(net: nn.Module) -> None:
    """And nothing else."""
    flat_param.flatten(net)


def trained(net: nn.Module) -> None:
    """With gradients in the flat one."""
    flat_param.flatten(net)
    train(net)


def stepped_over_chunks(net: nn.Module) -> None:
    """With an optimizer over leaves."""
    flat = flat_param.flatten(net)
    optimizer = torch.optim.AdamW(flat.chunks(64))
    train(net)
    flat.clip_(1.0)
    optimizer.step()


def moved(net: nn.Module) -> None:
    """Planned anew, in another dtype."""
    flat_param.flatten(net)
    train(net)
    net.to(torch.float64)
    net.zero_grad()
    train(net)


def copied(net: nn.Module) -> None:
    """Beside a copy that trains."""
    flat_param.flatten(net)
    train(copy.deepcopy(net))


def unflattened(net: nn.Module) -> None:
    """And trained as the plain module."""
    flat_param.flatten(net)
    train(net)
    flat_param.unflatten(net)
    train(net)


def sharded(way: str, *, trains: bool = True) -> Callable[[nn.Module], None]:
    """Two units, with an optimizer."""

    def make(net: nn.Module) -> None:
        mesh = init_device_mesh("cpu", (1, 1)) if way == "replicated" else None
        for each in (net[0], net):  # type: ignore[index]
            flat_param.fully_shard(each, mesh=mesh, reshard_after_forward=way != "ZeRO-2")
        optimizer = torch.optim.AdamW(net.parameters())
        if trains:
            train(net)
            optimizer.step()

    return make


def handled(net: nn.Module) -> None:
    """By torch's handle."""
    flat_param.handle.FlatParamHandle(list(net.parameters()), net)


COLLECTED = {way.__name__: way for way in (unflattened, handled)}


@pytest.mark.parametrize("way", COLLECTED)
def test_deleted_model_is_collected(way: str) -> None:
    """The parameters are collected after uses that leave cycles."""
    net = model()
    params = list(map(weakref.ref, net.parameters()))
    COLLECTED[way](net)
    params += map(weakref.ref, net.parameters())
    del net
    gc.collect()
    assert [param() for param in params] == [None] * len(params)


def shown(net: nn.Module) -> None:
    """Sharded, and gathered by hand."""
    sharded("ZeRO-3")(net)
    net.unshard()  # type: ignore[operator]


def saved(net: nn.Module) -> None:
    """Sharded, with state dicts taken and loaded."""
    sharded("ZeRO-3")(net)
    optimizer = torch.optim.AdamW(net.parameters())
    train(net)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    net.load_state_dict(flat_param.full_state_dict(net)["model"])


def failed_in_forward(net: nn.Module) -> None:
    """Sharded, and called with too wide an input."""
    sharded("ZeRO-3")(net)
    found = False
    try:  # pytest.raises keeps the frame, and with it the module
        net(torch.ones(2, 3))
    except RuntimeError:
        found = True
    assert found


AT_ONCE: dict[str, Callable[[nn.Module], None]] = {
    **{way.__name__: way for way in (flattened, trained, stepped_over_chunks, moved, copied)},
    **{each: sharded(each) for each in ("replicated", "ZeRO-2", "ZeRO-3")},
    "sharded alone": sharded("ZeRO-3", trains=False),
    **{way.__name__: way for way in (shown, saved, failed_in_forward)},
}


@pytest.mark.parametrize("way", AT_ONCE)
def test_deleted_model_is_freed_without_a_collection(group_of_one: None, way: str) -> None:
    """A unit and its schedule do not keep each other, nor a module and its segments."""
    AT_ONCE[way](model())  # the first step of a process imports modules of torch, which are cycles
    net = model()
    params = list(map(weakref.ref, net.parameters()))
    gc.collect()
    gc.disable()
    try:
        AT_ONCE[way](net)
        params += map(weakref.ref, net.parameters())
        del net
        assert [param() for param in params] == [None] * len(params)
    finally:
        gc.enable()


def test_pool_of_a_deleted_model_is_freed(group_of_one: None) -> None:
    """Also if gradients are kept, which refer to process groups."""
    net = model()
    sharded("ZeRO-3")(net)
    train(net)
    kept = [param.grad for param in net.parameters()]
    pool = weakref.ref(net._flat_param.schedule.pool)
    del net
    assert pool() is None
    assert kept


@pytest.mark.parametrize("way", ["trained", "stepped_over_chunks"])
def test_buffers_of_a_deleted_model_are_collected(way: str) -> None:
    """The vectors of parameters and gradients."""
    net = model()
    AT_ONCE[way](net)
    flat = flat_param.flat_params_of(net)
    assert flat is not None
    vectors = [weakref.ref(flat.as_vector()), weakref.ref(flat.grad_vector())]
    del net, flat
    gc.collect()
    assert [vector() for vector in vectors] == [None, None]


def test_parameter_of_a_deleted_model_still_gets_a_gradient() -> None:
    """A kept parameter still gets its gradient, without the flat gradient."""
    net = model()
    flat_param.flatten(net)
    train(net)
    weights = [layer.weight for layer in net]
    expected = [weight.grad.clone() for weight in weights]
    net.zero_grad()
    biases = [layer.bias.detach().clone() for layer in net]
    del net
    gc.collect()
    hidden = nn.functional.linear(X, weights[0], biases[0])
    nn.functional.linear(hidden, weights[1], biases[1]).sum().backward()
    for weight, grad in zip(weights, expected, strict=True):
        assert torch.equal(weight.grad, grad)
