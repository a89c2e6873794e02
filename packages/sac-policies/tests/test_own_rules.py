"""Autograd functions of one's own are replayed by their rule, once it has proved itself."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

from sac_policies import EngineError, MutationError, profile, replay_rule, report, save_ops, solve
from sac_policies.engines.recipe._own_rules import rule_of

from ._recipe import bytes_held, is_plain, leaf, run

pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")

SQUARE = torch.ops.aten.square.default


def a_function(*, saves_output: bool = False) -> type[torch.autograd.Function]:
    """A class of its own each time: twice the square; it saves what it reads, or its result.

    It counts its forwards, so that it has no rule but what it is given.
    """

    class Doubled(torch.autograd.Function):
        runs = 0

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            Doubled.runs += 1
            out = (x * x) * 2
            ctx.save_for_backward(x, out) if saves_output else ctx.save_for_backward(x)
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 4 * ctx.saved_tensors[0] * grad

    return Doubled


def given(function: Any, rebuild: Any = lambda x: (x * x) * 2, **more: Any) -> None:
    """Give the function its rule."""
    settings = {"op": SQUARE, "probe": lambda make: function.apply(make(5, 67)), **more}
    replay_rule(function, rebuild, **settings)


def test_output_is_kept_without_a_rule_and_rebuilt_with_one() -> None:
    """Also where a table had looked the class up before."""
    function, x = a_function(), leaf(6, 6)

    def body(t: torch.Tensor) -> torch.Tensor:
        return function.apply(t.sin()).cos()

    assert bytes_held(body, x) == 144
    given(function)
    assert bytes_held(body, x) == 0
    assert is_plain(body, x)
    plan = solve(profile(body, x, unit="flops"), 0)
    assert plan
    assert is_plain(body, x, policy=plan)


def test_policies_are_asked_about_the_operator_that_was_named() -> None:
    """Who saves that one keeps the output."""
    function, x = a_function(), leaf(6, 6)
    given(function)

    def body(t: torch.Tensor) -> torch.Tensor:
        return function.apply(t).cos()

    assert bytes_held(body, x, policy=save_ops("aten.square")) == 144
    assert bytes_held(body, x, policy=save_ops("aten.mm")) == 0


def test_two_classes_of_one_name_have_two_rules() -> None:
    """A rule belongs to the class."""
    one, other = a_function(), a_function()
    given(one)
    assert rule_of(one._backward_cls) is not None
    assert rule_of(other._backward_cls) is None


def test_later_rule_takes_the_place_of_the_first() -> None:
    """Tables that know the first look again."""
    function, x, calls = a_function(), leaf(6, 6), []

    def body(t: torch.Tensor) -> torch.Tensor:
        return function.apply(t).cos()

    def rebuild(saved: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return (saved * saved) * 2

    given(function)
    run(body, x)
    given(function, rebuild)
    calls.clear()
    run(body, x).sum().backward()
    assert calls == [1]


def test_result_that_the_function_saves_is_kept_and_no_cycle() -> None:
    """A recipe for it would hold the node that holds the recipe."""
    function, x = a_function(saves_output=True), leaf(6, 6)
    given(function, lambda x, out: (x * x) * 2)

    def body(t: torch.Tensor) -> torch.Tensor:
        return function.apply(t.sin()).cos()

    assert is_plain(body, x)
    gc.disable()
    try:
        out = run(body, x)
        mark = Counter()
        out.grad_fn.next_functions[0][0].metadata["mark"] = mark
        alive = weakref.ref(mark)
        del out, mark
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("rebuild", "reason"),
    [
        (lambda x: x * (x * 2 + 1e-6), "gives other bits in [0-9]+ of 335 elements"),
        (lambda x: ((x * x) * 2)[:1], r"gives shape \(1, 67\), not \(5, 67\)"),
        (lambda x: ((x * x) * 2).double(), "gives dtype torch.float64, not torch.float32"),
        (lambda x: ((x * x) * 2).t().contiguous().t(), "gives strides"),
        (lambda x: 1.0, "gives a float, not a tensor"),
        (lambda: None, "raises TypeError"),
        (lambda x: x.nothing, "raises AttributeError"),
        (lambda x: {}[1], "raises KeyError: 1"),
        (lambda x: x.mul_(x).mul_(2), "writes to what it reads"),
        (lambda x: (x * x) * 2 + 0 * x.data.zero_(), "writes to what it reads"),
    ],
)
def test_wrong_rule_is_refused_with_what_it_does(rebuild: Any, reason: str) -> None:
    """Before anyone uses it; the function is as without a rule."""
    function = a_function()
    with pytest.raises(EngineError, match=f"the rule for Doubled {reason}"):
        given(function, rebuild)
    assert rule_of(function._backward_cls) is None


def test_probe_of_another_function_is_refused() -> None:
    """It proves nothing of this one."""
    with pytest.raises(EngineError, match="has a probe that SinBackward0 makes, not Doubled"):
        given(a_function(), probe=lambda make: make(3).sin())


def test_zero_with_another_sign_is_another_value() -> None:
    """Equal numbers are not equal bits."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return -(x * x * 0)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return ctx.saved_tensors[0] * grad * 0

    with pytest.raises(EngineError, match="gives other bits in 335 of 335"):
        given(Nothing, lambda x: x * x * 0)


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        (lambda make, function: function.apply(make(0, 3)), "has a probe without elements"),
        (lambda make, function: {}[1], "has a probe that raises KeyError: 1"),
    ],
)
def test_probe_that_proves_nothing_is_refused(probe: Any, reason: str) -> None:
    """Any rule agrees with nothing."""
    function = a_function()
    with pytest.raises(EngineError, match=f"the rule for Doubled {reason}"):
        given(function, probe=lambda make: probe(make, function))


def test_rule_that_writes_only_later_is_refused_when_it_does() -> None:
    """What it wrote to is what backward reads."""
    function, x = a_function(), leaf(6, 6)

    def rebuild(saved: torch.Tensor) -> torch.Tensor:
        out = (saved * saved) * 2
        return out if saved.shape[0] == 5 else out + 0 * saved.zero_()

    given(function, rebuild)
    out = run(lambda t: function.apply(t.sin()).cos(), x)
    with pytest.raises(EngineError, match="the rule for Doubled wrote to what Doubled saved"):
        out.sum().backward()


def test_rule_that_is_wrong_only_later_is_named() -> None:
    """Also where it is another operator's output that differs."""
    function, x = a_function(), leaf(6, 6)
    given(function, lambda saved: (saved * saved) * (2 if saved.shape[0] == 5 else 3))
    out = run(lambda t: function.apply(t).tanh().cos(), x)
    with pytest.raises(MutationError, match="or what rebuilds Doubled gives something else now"):
        out.sum().backward()


def test_rule_that_fails_for_a_dtype_is_off_there_and_report_says_why() -> None:
    """It was tried for float32 when it was given."""
    function = a_function()

    def rebuild(x: torch.Tensor) -> torch.Tensor:
        return (x * x) * (2 if x.dtype is torch.float32 else 3)

    given(function, rebuild)
    x = leaf(6, 6).detach().double().requires_grad_()

    def body(t: torch.Tensor) -> torch.Tensor:
        return function.apply(t).cos()

    (row,) = [each for each in report(body, x, policy=~save_ops("*")).saved if each.why][1:]
    assert "is off for torch.float64 on cpu: it gives other bits in 335 of 335" in row.why
    assert is_plain(body, x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"function": torch.sin}, "but a rule is for a subclass of torch.autograd.Function"),
        ({"function": torch.nn.Linear}, "but a rule is for a subclass of torch.autograd.Function"),
        ({"rebuild": 3}, "rebuild 3 is a int, but it is called"),
        ({"probe": None}, "probe None is a NoneType, but it is called"),
        ({"op": "aten.square"}, "op 'aten.square' is a str, but policies are asked about one"),
    ],
)
def test_what_is_no_such_thing_is_refused(change: dict[str, Any], message: str) -> None:
    """Each says what to pass."""
    function = a_function()
    settings = {
        "function": function,
        "rebuild": lambda x: (x * x) * 2,
        "op": SQUARE,
        "probe": lambda make: function.apply(make(3)),
        **change,
    }
    with pytest.raises(EngineError, match=message):
        replay_rule(settings.pop("function"), settings.pop("rebuild"), **settings)
