"""A report says what the recipe engine replays, and why it keeps what it keeps."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from sac_policies import checkpoint, profile, report, save_every_nth, save_ops, solve

POLICY = save_ops("aten.mm")
pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")


@pytest.fixture
def x() -> torch.Tensor:
    """A leaf, (4, 4), all of it positive."""
    return torch.linspace(0.5, 1.5, 16).reshape(4, 4).requires_grad_()


def _written(t: torch.Tensor) -> torch.Tensor:
    y = F.silu(t)
    with torch.no_grad():
        y.mul_(2)
    return y.sin()


def _statistic(t: torch.Tensor) -> torch.Tensor:
    """The mean of a group norm, which has a gradient of its own."""
    return torch.native_group_norm(t.view(1, 4, 4), None, None, 1, 4, 4, 2, 1e-5)[1].sin()


@pytest.mark.parametrize(
    ("function", "made_by", "why"),
    [
        (
            lambda t: t.logcumsumexp(0).sin(),
            "LogcumsumexpBackward0",
            "no replay rule for LogcumsumexpBackward0",
        ),
        (
            lambda t: (t + 1.0).sin(),
            "AddBackward0",
            "AddBackward0 reads something that needs no gradient and was not saved",
        ),
        (
            lambda t: (t @ t + t).sin(),
            "AddBackward0",
            "AddBackward0 reads what cannot be had again: the policy saves aten.mm.default",
        ),
        (
            lambda t: (t.cos().t().clone() + t).sin(),
            "AddBackward0",
            "AddBackward0 reads what cannot be had again: "
            "CloneBackward0 does not know how its output lies in memory",
        ),
        (lambda t: (t @ t).sin(), "MmBackward0", "the policy saves aten.mm.default"),
        (torch.sin, "", "a parameter, an input, or made without a gradient"),
        (_written, "SiluBackward0", "written to since it was made"),
        (
            lambda t: F.group_norm(t.view(1, 4, 4), 2).sin(),
            "NativeGroupNormBackward0",
            "NativeGroupNormBackward0 did not save all that its rule reads",
        ),
        (
            lambda t: F.layer_norm(t.bfloat16(), (4,)).sin(),
            "NativeLayerNormBackward0",
            "the rule of aten.native_layer_norm.default is off for torch.bfloat16 on cpu: "
            "it gives other bits in # of # elements",
        ),
        (
            _statistic,
            "NativeGroupNormBackward0",
            "output 1 of aten.native_group_norm.default, whose rule rebuilds the first",
        ),
    ],
    ids=[
        *("no rule", "number", "policy behind", "format", "policy", "leaf", "written"),
        *("operand", "dtype", "second output"),
    ],
)
def test_kept_tensor_has_the_engines_reason(function, made_by, why, x):
    """The value is there, kept, with the one reason that holds."""
    saved = report(function, x, policy=POLICY).saved
    found = {
        (each.made_by, each.replayed, re.sub(r"\d+ of \d+", "# of #", each.why)) for each in saved
    }
    assert (made_by, False, why) in found


def test_value_of_the_caller_has_its_reason(x):
    """What was made before the region is the caller's."""
    (saved,) = report(torch.sin, F.silu(x), policy=POLICY).saved
    assert (saved.made_by, saved.why) == ("SiluBackward0", "the caller made it")


def test_value_of_an_inner_checkpoint_has_its_reason(x):
    """Another checkpoint's values are its own."""

    def function(t: torch.Tensor) -> torch.Tensor:
        return torch_checkpoint(F.silu, t, use_reentrant=False).sin()

    saved = report(function, x, policy=POLICY).saved
    assert saved[-1].why == "made under other saved-tensor hooks"


def test_tensor_subclass_has_its_reason(x):
    """A rule makes plain tensors, so a subclass is kept, and no plan is blamed for it."""

    class Marked(torch.Tensor):
        """A tensor subclass that does nothing."""

    saved = report(lambda t: F.silu(t.as_subclass(Marked)).sin(), x, policy=POLICY).saved
    why = "a tensor subclass, of which no rule rebuilds aten.silu.default"
    assert ("SiluBackward0", why) in {(each.made_by, each.why) for each in saved}


def test_replayed_tensors_are_those_that_the_engine_does_not_keep(x):
    """As many tensors reach the hooks around the region as the report calls kept."""

    def function(t: torch.Tensor) -> torch.Tensor:
        return F.silu(t @ t).view(2, 8).sin() + (t + 1.0).view(2, 8).cos()

    kept: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        checkpoint(function, x, policy=POLICY, engine="recipe")
    saved = report(function, x, policy=POLICY).saved
    assert [each.shape for each in saved if not each.replayed] == [tuple(t.shape) for t in kept]
    assert [each.made_by for each in saved if each.replayed] == ["SiluBackward0"]


def test_plan_is_a_reason(x):
    """A tensor that could be replayed and is not is kept by the plan."""

    def function(t: torch.Tensor) -> torch.Tensor:
        return F.silu(t).sin()

    whole, least = (solve(profile(function, x), share) for share in (1.0, 0))
    assert [e.why for e in report(function, x, policy=whole).saved][1] == "the plan keeps it"
    assert [e.replayed for e in report(function, x, policy=least).saved] == [False, True]


def test_policy_that_the_engine_refuses_has_no_rows(x):
    """Another engine follows it, which keeps operators' outputs: the other rows."""
    assert report(torch.mm, x, x, policy=save_every_nth("aten.mm", n=2)).saved == ()


def test_text_counts_tensors_by_reason(x):
    """str() of a report ends with what the recipe engine does."""
    lines = str(report(lambda t: (F.silu(t).sin() + 1.0).cos(), x, policy=POLICY)).splitlines()
    assert lines[-3:] == [
        "recipe engine: 1 of 3 saved tensors replayed",
        "  1 kept: a parameter, an input, or made without a gradient",
        "  1 kept: AddBackward0 reads something that needs no gradient and was not saved",
    ]


@pytest.mark.parametrize("engine", ["recipe", "contexts"])
def test_report_leaves_no_tensor_to_the_garbage_collector(engine: str) -> None:
    """Memory would stay until that runs, and its release would be part of a later measurement."""
    w = torch.randn(16, 16, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x + (x @ w).tanh() @ w).sigmoid() * x

    x = torch.randn(32, 16, requires_grad=True)
    report(function, x, policy=save_ops("aten.mm"), engine=engine)
    gc.collect()
    gc.disable()
    try:
        report(function, x, policy=save_ops("aten.mm"), engine=engine)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [tuple(each.shape) for each in gc.garbage if isinstance(each, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []
