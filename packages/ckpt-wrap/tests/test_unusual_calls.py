"""Modules, arguments, results and callers that are out of the ordinary."""

from __future__ import annotations

import copy
import sys
import threading

import pytest
import torch
from torch import nn

from ckpt_wrap import (
    OffloadStats,
    is_recomputing,
    offload_,
    offload_stats,
)


class Body(nn.Module):
    """A layer, and what is done with its result."""

    def __init__(self, call) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.call = call

    def forward(self, *args, **kwargs):
        return self.call(lambda x: torch.tanh(self.linear(x)), *args, **kwargs)


def _x():
    return torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()


def _block():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def _generated(run, x):
    return (run(x) * factor for factor in (1, 2))


def _nothing(run, x):
    return None


def _mixed(run, x):
    return {"a": run(x), "none": None, "list": [x, 1, (run(x) * 2,)]}


CALLS = {
    "generator": (_generated, lambda result: sum(result).sum()),
    "dict": (_mixed, lambda r: r["a"].sum() + r["list"][0].sum() + r["list"][2][0].sum()),
    "its input": (lambda run, x: (x, run(x)), lambda r: r[0].sum() + r[1].sum()),
    "a view": (lambda run, x: run(x).view(-1)[1:], lambda r: r.sum()),
    "by keyword": (lambda run, *, x: run(x), lambda r: r.sum()),
    "a scalar": (lambda run, x: run(x).sum(), lambda r: r),
    "complex": (lambda run, x: torch.fft.fft(run(x)), lambda r: r.abs().sum()),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_of_any_kind(layer, name, equal):
    """The gradients are the plain module's."""
    call, loss = CALLS[name]
    plain = Body(call)
    gradients = []
    for module in (plain, layer(copy.deepcopy(plain))):
        x = _x()
        loss(module(x=x) if name == "by keyword" else module(x)).backward()
        gradients.append([x.grad, *(p.grad for p in module.parameters())])
    assert equal(*gradients)


def test_no_result_and_no_input(layer):
    """None is returned as it is; a module without inputs gets its gradients."""
    assert layer(Body(_nothing))(_x()) is None
    module = layer(Body(lambda run: run(torch.ones(2, 4))))
    module().sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_backward_twice_is_torchs_error(layer):
    """With `retain_graph` it works, without it the plain module's error comes."""
    module, x = layer(_block()), _x()
    loss = module(x).sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("in_recomputation", [False, True])
def test_an_exception_comes_out_and_leaves_the_module_usable(layer, offloads, in_recomputation):
    """In forward, and in recomputation where there is one."""
    armed = [True]

    def call(run, x):
        if armed and is_recomputing() is in_recomputation:
            raise KeyError("the module's own")
        return run(x)

    module = layer(Body(call))
    if offloads and in_recomputation:
        module(_x()).sum().backward()
    else:
        with pytest.raises(KeyError, match="the module's own"):
            module(_x()).sum().backward()
    armed.clear()
    module(_x()).sum().backward()
    assert not is_recomputing()


def test_threads_do_not_disturb_each_other(layer):
    """Four threads with one module each: plain gradients, and all that left came back."""
    plain, x = _block(), _x()
    plain(x).sum().backward()
    failures = []

    def train(module):
        for _ in range(5):
            mine = _x()
            module.zero_grad()
            module(mine).sum().backward()
            if not torch.equal(mine.grad, x.grad) or is_recomputing():
                failures.append(mine.grad)
        if offload_stats(module).bytes_away:
            failures.append(offload_stats(module))

    modules = [layer(_block()) for _ in range(4)]
    threads = [threading.Thread(target=train, args=(module,)) for module in modules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_threads_with_one_folder_keep_their_own_order(tmp_path):
    """Four threads that change places all the time: each moves what it would move alone.

    A thread that fetched for another, or held what another had done with, would show in the counts.
    """
    expected = OffloadStats(
        copies_out=10,  # the input of Linear and the result of Tanh, five times
        bytes_out=10 * 32,
        copies_in=10,
        bytes_in=10 * 32,
        shared=0,
        kept=5,  # the weight, five times
        bytes_away=0,
        peak_bytes_away=64,
        late=10,  # of a backward's first call nothing is asked for ahead
    )
    failures = []

    def train(module):
        try:
            for _ in range(5):
                module(_x()).sum().backward()
        except BaseException as error:
            failures.append(error)
        if offload_stats(module) != expected:
            failures.append(offload_stats(module))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            modules = [offload_(_block(), to=tmp_path, min_bytes=1) for _ in range(4)]
            threads = [threading.Thread(target=train, args=(module,)) for module in modules]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not failures


def test_transforms_of_torch_func(layer):
    """Every transform gives what it gives for the plain module."""
    plain, changed = _block(), layer(_block())
    x = _x().detach()
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.vmap):
        torch.testing.assert_close(transform(changed)(x), transform(plain)(x))
    for direction in (torch.func.jvp, torch.func.vjp):
        tangents = ((x,), (x,)) if direction is torch.func.jvp else (x,)
        torch.testing.assert_close(direction(changed, *tangents)[0], direction(plain, *tangents)[0])


def test_moving_and_freezing_after_the_change(layer):
    """dtype, train mode and requires_grad reach every parameter."""
    module = layer(_block()).double().eval().requires_grad_(False)
    assert not module(_x().detach().double()).requires_grad
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    assert not any(m.training for m in module.modules())
