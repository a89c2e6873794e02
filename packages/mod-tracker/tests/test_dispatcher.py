"""The dispatcher: operators, modes and tensor classes, and what is done where torch is silent."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

import mod_tracker._torch_compat as compat
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
    assert compat.has_own_operators(kind) == own


def test_top_hooks_for_saved_tensors_are_the_innermost():
    """Both of them, as they were given; none where there are none."""
    outer, inner = (len, abs), (id, repr)
    assert compat.top_saved_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(*outer):
        with torch.autograd.graph.saved_tensors_hooks(*inner):
            assert compat.top_saved_hooks() == inner
        assert compat.top_saved_hooks() == outer
    assert compat.top_saved_hooks() is None


def test_mode_that_is_left_leaves_those_on_top_of_it():
    """In their order, also torch's own; nothing happens a second time."""
    below, left, above = Passes(), Passes(), Passes()
    with below:
        left.__enter__()
        with FakeTensorMode(), above:
            assert compat.mode_depth() == 4
            compat.leave_mode(left)
            compat.leave_mode(left)
            assert compat.mode_depth() == 3
    assert compat.mode_depth() == 0


class Inside(TorchDispatchMode):
    """Runs operators so that it sees what they do."""

    def __init__(self):
        super().__init__()
        self.seen, self.results = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        if func is torch.ops.aten._transformer_encoder_layer_fwd.default:
            ran = compat.run_inside(self, func, args, kwargs or {})
            self.results.append(ran)
            if ran is not None:
                return ran[0]
        return func(*args, **(kwargs or {}))


def _encode(device="cpu"):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True, device=device).eval()
    with torch.no_grad():
        return layer(torch.linspace(-1, 1, 2 * 5 * 8, device=device).reshape(2, 5, 8))


def test_what_a_fused_kernel_has_torch_do_is_seen():
    """And gives the same, to the last bit."""
    plain = _encode()
    with Inside() as mode:
        seen = _encode()
    assert torch.equal(plain, seen)
    assert {"addmm", "bmm", "_addmm_activation"} & set(mode.seen)


def test_nothing_runs_inside_where_there_is_no_data():
    """Of meta tensors and stand-ins there is no kernel to call."""
    with Inside() as mode, torch.no_grad():
        _encode("meta")
    with FakeTensorMode(), Inside() as other:
        _encode()
    assert set(mode.results + other.results) <= {None}
