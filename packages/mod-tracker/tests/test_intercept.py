"""An operator's calls go through a function, until that is undone."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mod_tracker._torch_compat as compat
from mod_tracker._torch_compat import _dispatcher

ATEN = torch.ops.aten


class Passes(TorchDispatchMode):
    """A mode that lets everything through."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def has_kernel():
    """Whether the place in front of the product's kernel is taken."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "BackendSelect")


def counting(seen):
    """What makes a kernel that counts, and runs the operator."""

    def make(run, below):
        def kernel(keys, *args, **kwargs):
            seen.append(len(args))
            return run(keys & below, *args, **kwargs)

        return kernel

    return make


def test_intercepted_operator_gives_what_it_gave_until_that_is_undone():
    """Values and gradients to the last bit, in every thread; undone twice, it is undone."""
    seen, x = [], torch.randn(3, 3, requires_grad=True)
    plain = torch.mm(x, x)
    (expected,) = torch.autograd.grad(plain.sum(), x)
    undo = compat.intercept(ATEN.mm.default, counting(seen))
    try:
        assert torch.equal(torch.mm(x, x), plain)
        assert torch.equal(torch.autograd.grad(torch.mm(x, x).sum(), x)[0], expected)
        assert seen == [2] * 4
        thread = threading.Thread(target=torch.mm, args=(x, x))
        thread.start()
        thread.join()
        assert len(seen) == 5
    finally:
        undo()
        undo()
    torch.mm(x, x)
    assert len(seen) == 5
    assert not has_kernel()


@pytest.mark.skipif(
    _dispatcher.look_up("_C._dispatch_get_computed_kernel_for_dispatch_key") is None,
    reason="this torch does not give a kernel",
)
def test_kernel_is_not_freed_while_another_thread_may_be_about_to_call_it():
    """It has found it, and waits for the interpreter's lock; torch would free it, and crash."""
    kernels, undone = [], _dispatcher._undone

    def make(run, below):
        kernel = counting([])(run, below)
        kernels.append(weakref.ref(kernel))
        return kernel

    for _ in range(2):
        compat.intercept(ATEN.mm.default, make)()
    assert [kernel() is None for kernel in kernels] == [False, False]
    undone.extend([None] * (undone.maxlen - 1))  # as many were taken out since
    assert [kernel() is None for kernel in kernels] == [True, False]


def test_operator_is_intercepted_once_at_a_time():
    """Whoever is second leaves the first alone; afterwards the place is free again."""
    seen = []
    undo = compat.intercept(ATEN.mm.default, counting(seen))
    try:
        assert compat.intercept(ATEN.mm.default, counting([])) is None
        torch.mm(torch.ones(1, 1), torch.ones(1, 1))
    finally:
        undo()
    assert seen == [2]
    again = compat.intercept(ATEN.mm.default, counting(seen))
    again()
    assert not has_kernel()


@pytest.mark.parametrize("operator", [ATEN.mm, torch.ops.higher_order.cond, None, "aten::mm"])
def test_what_is_no_overload_cannot_be_intercepted(operator):
    """Nothing is made for it, and nothing is raised."""
    make = lambda *_: pytest.fail("was made")  # noqa: E731
    assert compat.intercept(operator, make) is None


@pytest.mark.parametrize(
    "lacks",
    [
        "_C.DispatchKey.BackendSelect",
        "_C._dispatch_keyset_full_after",
        "_C._dispatch_has_kernel_for_dispatch_key",
    ],
)
def test_nothing_is_intercepted_where_torch_lacks_a_name(lacks, monkeypatch):
    """Which is found out without trying."""
    real = _dispatcher.look_up
    monkeypatch.setattr(_dispatcher, "look_up", lambda name: None if name == lacks else real(name))
    assert compat.intercept(ATEN.mm.default, counting([])) is None
    assert not _dispatcher.can_intercept.__wrapped__()


def refusing(kernel):
    """A kernel that torch lets be made and does not run."""

    def refuse(*_):
        raise RuntimeError("no")

    return refuse


def wrong(kernel):
    """A kernel whose result is another's."""
    return lambda *args: kernel(*args) + 1


@pytest.mark.parametrize("change", [refusing, wrong, lambda kernel: lambda *args: 3])
def test_interception_that_changes_something_is_not_relied_on(change, monkeypatch):
    """An error, another value, no tensor: and it is undone."""
    real = _dispatcher.intercept

    def intercept(operator, make):
        return real(operator, lambda run, below: change(make(run, below)))

    monkeypatch.setattr(_dispatcher, "intercept", intercept)
    assert not _dispatcher.can_intercept.__wrapped__()
    assert not has_kernel()


def test_interception_that_sees_nothing_is_not_relied_on(monkeypatch):
    """torch says that it was done, and goes another way."""
    monkeypatch.setattr(_dispatcher, "intercept", lambda operator, make: lambda: None)
    assert not _dispatcher.can_intercept.__wrapped__()


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        Passes,
    ],
)
def test_interception_is_tried_alike_in_any_context(context):
    """The answer is for the whole process."""
    with context():
        assert _dispatcher.can_intercept.__wrapped__()
    assert not has_kernel()
