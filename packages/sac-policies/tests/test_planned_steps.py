"""Forwards under a plan that follow steps decide as those that decide again each time."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sac_policies import BudgetPlan, RecomputeError, UnmatchedEntryWarning, profile, solve, span
from sac_policies.engines.recipe._replay_entries import every_rule
from sac_policies.engines.recipe._writes import habits_of
from sac_policies.engines.recipe.regions import _planned_steps
from sac_policies.engines.recipe.regions._planned_steps import repeats_of
from sac_policies.engines.recipe.regions._recorded import END, Shape
from sac_policies.engines.recipe.regions._repeats import Repeats
from sac_policies.policies._unmatched import subject_of

from ._followed import BIAS, ROWS, SCALE, WEIGHTS, WIDTH, gpt, in_views, llama, written
from ._recipe import Counts, bytes_kept, is_plain, leaf, run

PLANS = ((0.0, True), (0.3, True), (0.7, True), (0.3, False))
"""What share is kept of what may be, and whether calls are seen."""


def plan_of(
    function: Callable[..., Any],
    x: Tensor,
    share: float = 0.0,
    *,
    sees: bool = True,
    strict: bool = False,
) -> BudgetPlan:
    """One that keeps this share of what it may keep."""
    noted = profile(function, x)
    trace = replace(noted, unseen=None) if sees else noted.without_calls
    assert trace is not None
    least, most = trace.fixed_bytes(), trace.total_bytes()
    plan = solve(trace, least + int(share * (most - least)), strict=strict)
    assert isinstance(plan, BudgetPlan)
    return plan


def keeping(kind: str, plan: BudgetPlan) -> BudgetPlan:
    """The same, but it keeps the first value that a node of this kind made."""
    packs = list(plan.packs)
    packs[packs.index((kind, False))] = kind, True
    return replace(plan, packs=tuple(packs))


def anew(plan: BudgetPlan) -> BudgetPlan:
    """An equal plan, of which nothing is known: its first forward decides."""
    return replace(plan)


def shape_of(plan: BudgetPlan, function: Callable[..., Any], x: Tensor) -> Shape:
    """What is known of the function's forwards under the plan."""
    subject, repeats = subject_of(function), repeats_of(plan, every_rule)
    found = Repeats._shape(repeats, subject, habits_of(function), (x,))
    assert found is not None
    return found


def learnt(plan: BudgetPlan, function: Callable[..., Any], x: Tensor) -> Shape:
    """Have it followed once."""
    for _ in range(3):
        assert is_plain(function, x, policy=plan)
    shape = shape_of(plan, function, x)
    assert shape.followed == 1
    return shape


def refusal(function: Callable[..., Tensor], x: Tensor, plan: BudgetPlan) -> str:
    """What a strict plan says, but for its own name; "" if it is content."""
    try:
        run(function, x, policy=plan)
    except RecomputeError as error:
        return str(error).replace(plan.text, "")
    return ""


def stepped(
    function: Callable[..., Tensor], x: Tensor, plan: BudgetPlan
) -> tuple[Counter[Any], Tensor]:
    """What backward runs, and its gradient."""
    out = run(function, x, policy=plan).sum()
    with Counts() as counts:
        (grad,) = torch.autograd.grad(out, x)
    return counts.ops, grad


@pytest.mark.parametrize(("share", "sees"), PLANS)
@pytest.mark.parametrize("function", [llama, gpt, written, in_views])
def test_third_forward_follows_and_keeps_what_the_first_did(
    function: Callable[..., Tensor], share: float, sees: bool
) -> None:
    """The first decides, the second is written down."""
    x = leaf(ROWS, WIDTH)
    plan = plan_of(function, x, share, sees=sees)
    stepped(function, x, anew(plan))  # rules are checked as they are met
    kept = [bytes_kept(function, x, policy=plan) for _ in range(4)]
    shape = shape_of(plan, function, x)
    assert kept == kept[:1] * 4
    assert (shape.followed, shape.left) == (2, 0)
    assert stepped(function, x, plan)[0] == stepped(function, x, anew(plan))[0]


def reused(x: Tensor) -> Tensor:
    """Results in place, which others save as well."""
    for w in WEIGHTS[:2]:
        y = (x @ w).mul_(2.0).relu_()
        x = (y @ w).tanh() + y
    return x


@pytest.mark.parametrize(("share", "sees"), PLANS)
@pytest.mark.parametrize("function", [llama, gpt, written, in_views, reused])
def test_forward_that_leaves_goes_on_with_the_plan(
    function: Callable[..., Tensor], share: float, sees: bool
) -> None:
    """At each position: a strict plan is content; bytes, operators, gradients are as without."""
    x = leaf(ROWS, WIDTH)
    plan = plan_of(function, x, share, sees=sees, strict=True)
    shape = learnt(plan, function, x)
    steps, notes = shape.steps, shape.notes
    assert steps is not None
    kept = bytes_kept(function, x, policy=anew(plan))
    again, _ = stepped(function, x, anew(plan))
    (expected,) = torch.autograd.grad(function(x).sum(), x)

    def leave(at: int) -> None:
        shape.steps, shape.left, shape.notes = (*steps[:at], END), 0, notes

    for at in range(len(steps) - 1):
        leave(at)
        assert bytes_kept(function, x, policy=plan) == kept
        assert shape.steps is None
        leave(at)
        found, grad = stepped(function, x, plan)
        assert found == again
        assert torch.equal(grad, expected)


class Changing:
    """A function that does something else when told."""

    def __init__(self) -> None:
        self.on = ""

    def __call__(self, x: Tensor) -> Tensor:
        """Sums, gates, and a number."""
        y = (x @ WEIGHTS[0] + x).sin()
        if self.on == "more":
            y = y.tanh()
        if self.on == "shift":
            x.neg()
        y = (y.cos() if self.on == "other" else y.exp()) * x
        if self.on == "view":
            y = y.view(-1, WIDTH)
        y = y + 1.0
        if self.on == "number":
            y = y + x.detach().tanh()
        if self.on == "inside":
            y = run(torch.sin, y)
        if self.on == "span":
            y = span(torch.sin, "sine")(y)
        if self.on == "checkpoint":
            y = torch.utils.checkpoint.checkpoint(torch.sin, y, use_reentrant=False)
        if self.on == "write":
            y.detach().mul_(1.0)
        if self.on == "stuck":
            y = y + torch.fft.fft(x.to(torch.complex64)).real
        y = F.silu(y) @ WEIGHTS[1]
        if self.on == "less":
            return y.exp()
        return (y.exp() + y).sin().view(4, -1).exp()


SAME = ("shift", "view", "number")
"""What a strict plan does not mind: it saves what was planned."""
UNSEEN = ("stuck", "write")
"""What changes a value that only a call could make again."""
CHANGES = (*SAME, "more", "other", "stuck", "less", "inside", "span", "checkpoint", "write")


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize(("share", "sees"), PLANS)
@pytest.mark.parametrize("change", CHANGES)
def test_forward_that_changes_is_decided_on_as_without_steps(
    change: str, share: float, sees: bool
) -> None:
    """Whatever it does: bytes, operators of backward, and what a strict plan says."""
    x, function = leaf(ROWS, WIDTH), Changing()
    plan = plan_of(function, x, share, sees=sees)
    strict = replace(plan, strict=True)
    for each in (plan, strict):
        learnt(each, function, x)
    function.on = change
    kept = bytes_kept(function, x, policy=anew(plan))
    assert bytes_kept(function, x, policy=plan) == kept
    is_change = sees or change not in UNSEEN
    assert not is_change or shape_of(plan, function, x).followed == 0
    assert is_plain(function, x, policy=plan)
    said = [refusal(function, x, each) for each in (strict, anew(strict))]
    assert said[0] == said[1]
    assert change not in SAME or not said[0]
    is_other = is_change and change in ("more", "other", "stuck", "less")
    assert not is_other or "saved tensor" in said[0]


def test_what_the_plan_keeps_brings_nothing_nearer() -> None:
    """A chain of more than 32 sums is unknown to who left its steps, too, as to the plan."""
    x, on = leaf(ROWS, WIDTH), [False]

    def added(y: Tensor, count: int) -> Tensor:
        for _ in range(count):
            y = y + BIAS
        return y

    def function(x: Tensor) -> Tensor:
        one = added(x @ WEIGHTS[0], 15)
        two = added(one, 15)
        out = one.sin() + two.sin()
        if on[0]:
            out = out + two.cos()
        return out + one.neg().sin() + added(two, 12).sin()

    plan = keeping("AddBackward0", plan_of(function, x))
    learnt(plan, function, x)
    on[0] = True
    assert unknown(function, x, plan) == unknown(function, x, anew(plan))


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
def test_small_tensor_can_be_read_by_whoever_has_to() -> None:
    """A scale that only what was kept reads, until another norm's decision is taken for it."""
    x, on = leaf(ROWS, WIDTH), [False]

    def function(x: Tensor) -> Tensor:
        y = F.layer_norm(x, (WIDTH,), SCALE, BIAS)
        out = y @ WEIGHTS[0]
        if on[0]:
            out = out + x.exp() + y.sin()
        return F.layer_norm(out, (WIDTH,), SCALE, BIAS) @ WEIGHTS[1]

    plan = keeping("NativeLayerNormBackward0", plan_of(function, x))
    learnt(plan, function, x)
    on[0] = True
    assert stepped(function, x, plan)[0] == stepped(function, x, anew(plan))[0]


def unknown(function: Callable[..., Tensor], x: Tensor, plan: BudgetPlan) -> str:
    """How many tensors the plan does not know, of how many."""
    with pytest.warns(UnmatchedEntryWarning) as told:
        run(function, x, policy=plan)
    return str(told[0].message).partition(" (")[0]


def test_value_that_could_not_be_made_again_is_not_as_planned() -> None:
    """Its node is as it was, and kept; what lies behind it has no rule now."""
    x, mode = leaf(ROWS, WIDTH), ["nearest"]

    def function(x: Tensor) -> Tensor:
        made = F.interpolate(x.view(1, 1, ROWS, WIDTH), size=(ROWS, WIDTH), mode=mode[0])
        return (made.view(ROWS, WIDTH) + x @ WEIGHTS[0]).sin()

    plan = keeping("AddBackward0", plan_of(function, x, strict=True))
    learnt(plan, function, x)
    mode[0] = "nearest-exact"
    said = [refusal(function, x, each) for each in (plan, anew(plan))]
    assert said[0] == said[1] != ""


def test_unknown_tensor_is_told_of_once() -> None:
    """By who left its steps, with how many were saved in all; by nobody after that."""
    x, function = leaf(ROWS, WIDTH), Changing()
    plan = plan_of(function, x, 0.3)
    learnt(plan, function, x)
    function.on = "more"
    assert unknown(function, x, plan) == unknown(function, x, anew(plan))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            run(function, x, policy=plan)


def test_forward_that_saves_other_tensors_is_not_written_down() -> None:
    """Its decisions are not the plan's, one by one."""
    x, function = leaf(ROWS, WIDTH), Changing()
    plan = plan_of(function, x)
    function.on = "less"
    for _ in range(4):
        assert is_plain(function, x, policy=plan)
    assert shape_of(plan, function, x).steps is None


def test_other_shapes_have_steps_of_their_own() -> None:
    """A plan for one length is followed for another, which knows nothing of the first."""
    x, more = leaf(ROWS, WIDTH), leaf(2 * ROWS, WIDTH)
    function = Changing()
    plan = plan_of(function, x)
    learnt(plan, function, x)
    learnt(plan, function, more)
    assert shape_of(plan, function, x).followed == 1


def test_under_others_hooks_every_forward_decides() -> None:
    """So it does under modes; neither is a reason to write the steps down anew."""
    x, function = leaf(ROWS, WIDTH), Changing()
    plan = plan_of(function, x, 0.3)
    learnt(plan, function, x)
    with saved_tensors_hooks(lambda held: held, lambda held: held):
        assert is_plain(function, x, policy=plan)
    with Counts():
        run(function, x, policy=plan)
    assert shape_of(plan, function, x).followed == 1
    assert is_plain(function, x, policy=plan)
    assert shape_of(plan, function, x).followed == 2


@pytest.mark.parametrize("strict", [False, True])
def test_plan_that_is_gone_leaves_nothing_behind(strict: bool) -> None:
    """Neither it nor what was known of it; it needs no collector."""
    x, function = leaf(ROWS, WIDTH), Changing()
    plan = plan_of(function, x, 0.3, strict=strict)
    learnt(plan, function, x)
    function.on = "shift"
    run(function, x, policy=plan)
    key, gone = (id(plan), every_rule), weakref.ref(plan)
    known = weakref.ref(repeats_of(plan, every_rule))
    gc.disable()
    try:
        del plan
        assert gone() is None
        assert known() is None
        assert key not in _planned_steps._known
    finally:
        gc.enable()


def test_nothing_of_a_forward_lives_longer_than_its_graph() -> None:
    """What was followed, looked at, and decided after leaving goes with it."""
    x, function = leaf(ROWS, WIDTH), Changing()
    plan = plan_of(function, x, 0.7)
    learnt(plan, function, x)
    marks: list[weakref.ref[Any]] = []

    def forward() -> None:
        out, mark = run(function, x, policy=plan), torch.nn.Identity()
        marks.append(weakref.ref(mark))
        out.grad_fn.metadata["mark"] = mark

    gc.disable()
    try:
        for function.on in ("", "shift"):
            forward()
        assert [each() for each in marks] == [None, None]
    finally:
        gc.enable()
