"""The dispatcher: operators, modes and tensor classes, and what is done where torch is silent."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

import mod_tracker._torch_compat as compat
from mod_tracker import profile_memory
from mod_tracker._torch_compat import _dispatcher


def test_tensor_subclasses_are_plain_inside_the_context(monkeypatch):
    """`__torch_function__` is not asked; without torch's switch nothing changes."""

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise ZeroDivisionError

    with compat.without_torch_function():
        assert not Loud(2).requires_grad
    monkeypatch.setattr(_dispatcher, "look_up", lambda dotted: None)
    with compat.without_torch_function(), pytest.raises(ZeroDivisionError):
        assert not Loud(2).requires_grad


def test_composite_operators_are_known():
    """A layer's operator has parts; a product has none; without the question, nothing has."""
    assert compat.is_composite(torch.ops.aten.linear.default)
    assert not compat.is_composite(torch.ops.aten.mm.default)
    assert not compat.is_composite(object())


def test_where_torch_tells_nothing_of_its_modes_every_step_is_looked_at(monkeypatch, mlp):
    """Nobody could say whether a context of the user's is open, so none is opened or closed."""
    monkeypatch.setattr(_dispatcher, "look_up", lambda name: None)
    assert (_dispatcher.mode_depth(), _dispatcher.top_mode()) == (-1, None)
    assert _dispatcher.top_saved_hooks() is _dispatcher.guarded_keys() is None
    with profile_memory() as report:
        for _ in range(7):
            mlp(torch.randn(2, 4)).sum().backward()
    assert report.notes == ()


@pytest.mark.parametrize("error", [AttributeError, TypeError, RuntimeError])
def test_operator_that_torch_does_not_let_be_watched_is_left_alone(monkeypatch, error):
    """Whatever it raises: the report looks at every operator then."""

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(torch.library, "Library", refuse)
    operator = torch.ops.aten.mm.default
    assert _dispatcher.intercept(operator, lambda run, below: run) is None


def test_autocast_is_left_out_of_what_contexts_have_switched():
    """Others are not: inference mode would put back what is switched inside of it."""
    before = _dispatcher.guarded_keys()
    assert before is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert _dispatcher.guarded_keys() == before
    with torch.inference_mode():
        assert _dispatcher.guarded_keys() is None
    _dispatcher._unguarded_keys.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert _dispatcher.guarded_keys() == before


ATEN = torch.ops.aten


class Own(torch.Tensor):
    """Carries out operators itself."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Plain(torch.Tensor):
    """A class of tensors that does nothing of its own."""


class Passes(TorchDispatchMode):
    """A mode that lets everything through."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("operator", [ATEN.mm.default, ATEN.silu_backward.default, ATEN.mm, None])
def test_operator_with_a_kernel_of_its_own_has_no_parts(operator):
    """Also where it could be taken apart; a packet and what is no operator have none."""
    assert not compat.is_composite(operator)


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, TypeError])
def test_operator_that_torch_does_not_know_has_no_parts(error):
    """Whatever torch raises when it is asked."""

    class Unknown:
        def _can_decompose(self):
            return True

        def name(self):
            raise error

    assert not compat.is_composite(Unknown())


@pytest.mark.parametrize("lacks", [None, "_COMPOSITE", "_has_kernel"])
def test_parts_give_the_operators_own_bits(lacks, monkeypatch):
    """By its C++ parts, or by those of Python where torch lacks the way to them."""
    x, w, bias = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
    if lacks == "_COMPOSITE":
        monkeypatch.setattr(_dispatcher, "_COMPOSITE", None)
    elif lacks == "_has_kernel":
        monkeypatch.setattr(_dispatcher, "_has_kernel", lambda *_: False)
    with torch.inference_mode():
        made = compat.run_parts(ATEN.linear.default, (x, w), {"bias": bias})
        assert torch.equal(made, torch.nn.functional.linear(x, w, bias))


def test_parts_are_those_of_the_kernel_in_cpp(monkeypatch):
    """A decomposition in Python, which may differ from it, is not asked where there is one."""
    operator = ATEN.linear.default
    monkeypatch.setattr(type(operator), "decompose", lambda *_, **__: pytest.fail("was asked"))
    compat.run_parts(operator, (torch.ones(1, 2), torch.ones(3, 2)), {})


def test_operators_that_take_functions_are_known(monkeypatch):
    """`torch.cond` does; a product does not; where torch has no such class, none does."""
    cond = torch.ops.higher_order.cond
    assert [compat.is_higher_order(each) for each in (cond, ATEN.mm.default, None)] == [
        *(True, False, False)
    ]
    monkeypatch.setattr(_dispatcher, "_HigherOrderOperator", None)
    assert not compat.is_higher_order(cond)


@pytest.mark.parametrize(
    ("kind", "own", "stand_in"),
    [
        (torch.Tensor, False, False),
        (torch.nn.Parameter, False, False),
        (Plain, False, False),
        (Own, True, False),
        (type("Below", (Own,), {}), True, False),
        (FakeTensor, False, True),
        (type("BelowFake", (FakeTensor,), {}), False, True),
        (FunctionalTensor, False, True),
    ],
)
def test_classes_of_tensors_are_told_apart(kind, own, stand_in):
    """The user's that carry out operators, torch's stand-ins, and those that do neither."""
    assert (compat.has_own_operators(kind), compat.is_stand_in(kind)) == (own, stand_in)


def test_top_mode_is_the_one_that_is_asked_first():
    """The last of the user's, before those of torch itself; as many are on as were entered."""
    first, last, elsewhere = Passes(), Passes(), []
    look = lambda: (compat.mode_depth(), compat.top_mode())  # noqa: E731
    assert look() == (0, None)
    with first:
        assert look() == (1, first)
        with last, FakeTensorMode():
            assert look() == (3, last)
            thread = threading.Thread(target=lambda: elsewhere.append(look()))
            thread.start()
            thread.join()
        assert look() == (1, first)
    assert elsewhere == [(0, None)]


def test_top_hooks_for_saved_tensors_are_the_innermost():
    """Both of them, as they were given; none where there are none."""
    outer, inner = (len, abs), (id, repr)
    assert compat.top_saved_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(*outer):
        with torch.autograd.graph.saved_tensors_hooks(*inner):
            assert compat.top_saved_hooks() == inner
        assert compat.top_saved_hooks() == outer
    assert compat.top_saved_hooks() is None


def test_what_a_context_switches_is_seen_and_gone_when_it_ends():
    """Gradients that are off switch nothing there, and a mode what its depth tells."""
    before = compat.guarded_keys()
    with torch.no_grad(), Passes():
        assert compat.guarded_keys() == before
    with torch._C._AutoDispatchBelowAutograd():
        assert compat.guarded_keys() != before
    assert compat.guarded_keys() == before


def test_mode_that_is_left_leaves_those_on_top_of_it(monkeypatch):
    """In their order, also torch's own; nothing happens a second time."""
    below, left, above = Passes(), Passes(), Passes()
    with below:
        left.__enter__()
        with FakeTensorMode(), above:
            compat.leave_mode(left)
            assert (compat.mode_depth(), compat.top_mode()) == (3, above)
            compat.leave_mode(left)
            assert (compat.mode_depth(), compat.top_mode()) == (3, above)
        assert compat.top_mode() is below
    monkeypatch.setattr(_dispatcher, "mode_depth", lambda: -1)
    with left:
        compat.leave_mode(left)
        left.__enter__()


@pytest.mark.parametrize(
    "lacks",
    [
        "_C._dispatch_tls_local_include_set",
        "_C._dispatch_tls_local_exclude_set",
        "_C.DispatchKey",
        "_C.DispatchKeySet",
    ],
)
def test_what_is_switched_is_unknown_where_torch_lacks_a_name(lacks, monkeypatch):
    """One is enough, and nothing is raised."""
    real = _dispatcher.look_up
    _dispatcher._unguarded_keys.cache_clear()
    monkeypatch.setattr(_dispatcher, "look_up", lambda name: None if name == lacks else real(name))
    assert compat.guarded_keys() is None


def test_compiler_at_work_is_noticed(fresh_compiler):
    """In what a backend does, and neither before nor in what was compiled."""
    seen = []

    def backend(graph, inputs):
        seen.append(compat.compile_question()() is not None)
        return lambda *args: (
            seen.append(compat.compile_question()() is not None),
            graph.forward(*args),
        )[1]

    assert compat.compile_question()() is None
    torch.compile(torch.nn.ReLU(), backend=backend)(torch.ones(1))
    assert seen == [True, False]


@pytest.mark.parametrize(
    ("operator", "known"),
    [
        (ATEN.mm.default, True),
        (ATEN.add.Tensor, True),
        (ATEN.tanh.float, False),
        (ATEN.mm, False),
        (torch.ops.higher_order.cond, False),
        (None, False),
    ],
)
def test_overloads_of_the_dispatcher_are_known(operator, known):
    """Those for TorchScript's numbers, packets and operators of Python are none."""
    assert compat.is_dispatched(operator) is known


def test_overload_whose_handle_raises_is_not_the_dispatchers():
    """torch looks for it when it is asked."""

    class Raises:
        @property
        def _handle(self):
            raise RuntimeError("no such operator")

    assert not compat.is_dispatched(Raises())
