"""Policy entries that match nothing: errors, warnings and their texts."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from torch import nn

from sac_policies import (
    ATTENTION,
    UnmatchedEntryWarning,
    UnmatchedNameError,
    checkpoint,
    checkpoint_name,
    save_modules,
    save_named,
    save_ops,
    scoped,
)
from sac_policies.policies._unmatched import uses


class _Stack(nn.Module):
    """Two layers below `blocks`, and an optional `router`; x is (n, 4)."""

    def __init__(self, *, routed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.router, self.routed = nn.Linear(4, 4), routed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint_name(block(x), "hidden").sin()
        return self.router(x) if self.routed else x


@pytest.fixture
def x() -> torch.Tensor:
    """The input of a stack, (2, 4)."""
    return torch.ones(2, 4, requires_grad=True)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (
            save_modules("blocsk.*"),
            r"module 'blocsk\.\*' of the policy is in no region .*but .*"
            r"Did you mean 'blocks\.[01]' or .* pass missing_ok=True\.",
        ),
        (
            scoped(save_ops("aten.addmm"), "block"),
            r"module 'block' .*Did you mean 'blocks'",
        ),
        (
            save_modules("layers.3.attn"),
            r"module 'layers\.3\.attn' .*below the checkpointed module",
        ),
        (
            save_named("hiden"),
            r"tensor 'hiden' .*Did you mean 'hidden'\?",
        ),
        (save_ops("aten.addmm") | save_named("zzz"), r"tensor 'zzz' .*There are 'hidden'\."),
        (~save_named("qqq"), r"tensor 'qqq'"),
    ],
    ids=["modules", "scoped", "absolute", "named", "union", "complement"],
)
def test_name_that_nothing_has_raises_in_the_first_backward(policy, said, x):
    """The error names the entry, close matches and a remedy."""
    out = checkpoint(_Stack(), x, policy=policy).sum()
    with pytest.raises(UnmatchedNameError, match=said):
        out.backward()


def test_module_that_does_not_run_is_there(x):
    """Paths of the checkpointed module are known, even of modules that do not run."""
    checkpoint(_Stack(), x, policy=save_modules("router")).sum().backward()


def test_name_of_a_later_region_is_there(x):
    """All regions of a forward count: only the last one has the module and the tensor."""
    policy = save_modules("router") | save_named("last")
    plain = nn.Sequential(nn.Linear(4, 4))
    y = checkpoint(plain, x, policy=policy)
    y = checkpoint(_Stack(routed=True), y, policy=policy)
    last = nn.Tanh()
    last.register_forward_hook(lambda module, args, out: checkpoint_name(out, "last"))
    checkpoint(last, y, policy=policy).sum().backward()


def test_name_of_another_step_is_there(x):
    """A name that matched once is not checked in later steps."""
    policy = save_modules("router")
    checkpoint(_Stack(routed=True), x, policy=policy).sum().backward()
    assert not uses.of(policy).open
    checkpoint(nn.Sequential(nn.Linear(4, 4)), x, policy=policy).sum().backward()


def test_gradient_in_the_middle_of_a_forward_does_not_ask(x):
    """A backward inside a region runs before the forward has ended."""
    policy = save_named("late")

    def body(t):
        inner = checkpoint(torch.sin, t, policy=policy).sum()
        (slope,) = torch.autograd.grad(inner, t, create_graph=True)
        return checkpoint_name(slope * t, "late")

    checkpoint(body, x, policy=policy).sum().backward()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "policy",
    [
        save_modules("router2", missing_ok=True),
        scoped(save_ops("aten.addmm"), "router2", missing_ok=True),
        save_named("hiden", missing_ok=True),
        save_named("*", missing_ok=True),
    ],
    ids=["modules", "scoped", "named", "glob"],
)
def test_missing_ok_is_silent(policy):
    """A name that may be missing gives no warning."""
    x = torch.ones(2, 4, requires_grad=True)
    checkpoint(nn.Sequential(nn.Linear(4, 4)), x, policy=policy).sum().backward()


def test_error_goes_when_the_name_comes(x):
    """A corrected model is accepted under the same policy."""
    policy = save_modules("router")
    plain, mended = nn.Sequential(nn.Linear(4, 4)), _Stack(routed=True)
    with pytest.raises(UnmatchedNameError):
        checkpoint(plain, x, policy=policy).sum().backward()
    checkpoint(mended, x, policy=policy).sum().backward()


def test_warning_of_an_operator_names_one_that_ran(x):
    """If an operator exists but does not run, the warning names an operator that ran."""
    said = r"entries 'aten\.mm' match nothing .*Did you mean 'aten\.addmm'\?"
    with pytest.warns(UnmatchedEntryWarning, match=said):
        checkpoint(_Stack(), x, policy=save_ops("aten.mm"))


@pytest.mark.filterwarnings("error")
def test_list_of_which_one_entry_ran_is_silent(x):
    """The other entries are for other models and devices."""
    policy = save_ops("aten.mm", "aten.addmm", ATTENTION, "aten.bm*")
    checkpoint(_Stack(), x, policy=policy).sum().backward()


def test_warning_points_at_the_line_of_the_region(x):
    """Not a line in the package or torch, nor the caller of the function around the region."""
    policy = save_ops("aten.mm")
    region = partial(checkpoint, policy=policy)

    def forward(t):
        return region(nn.Tanh(), t)

    with pytest.warns(UnmatchedEntryWarning) as told:
        forward(x)
    assert [each.filename for each in told] == [__file__]
    assert [each.lineno for each in told] == [forward.__code__.co_firstlineno + 1]


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_warns_of_operators(x):
    """The warning is given when the policy's first region is traced."""
    stack, policy = _Stack(), save_ops("aten.mish") | save_ops("aten.addmm")
    compiled = torch.compile(lambda t: checkpoint(stack, t, policy=policy), backend="aot_eager")
    said = r"entries 'aten\.mish' match nothing in the region"
    with pytest.warns(UnmatchedEntryWarning, match=said) as told:
        compiled(x).sum().backward()
    compiled(torch.ones(3, 4, requires_grad=True)).sum().backward()
    (only,) = [each for each in told if each.category is UnmatchedEntryWarning]
    assert only.filename == __file__


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_is_not_asked_for_names(x):
    """A trace has no end of the forward: the name may be compiled later."""
    stack, policy = _Stack(), save_modules("blocsk") | save_named("hiden")
    compiled = torch.compile(lambda t: checkpoint(stack, t, policy=policy), backend="aot_eager")
    compiled(x).sum().backward()


def test_every_region_is_looked_at_once(x):
    """A second model under an equal policy is checked too; each model warns once."""
    for _ in range(2):
        stack = nn.Sequential(nn.Linear(4, 4))
        with pytest.warns(UnmatchedEntryWarning, match=r"region .Sequential., but") as told:  # noqa: PT031
            for _ in range(3):
                checkpoint(stack, x, policy=save_ops("aten.mm"))
        assert len(told) == 1


def test_region_is_not_excused_by_another(x):
    """Operators of one region do not count for another."""
    policy = save_ops("aten.addmm")
    checkpoint(nn.Linear(4, 4), x, policy=policy)
    with pytest.warns(UnmatchedEntryWarning, match=r"'aten\.addmm' match nothing .* 'Tanh'"):
        checkpoint(nn.Tanh(), x, policy=policy)


def test_function_written_once_is_warned_of_once(x):
    """A lambda created anew in each step has the same code object."""
    with pytest.warns(UnmatchedEntryWarning, match=r"in the region '<lambda>'") as told:  # noqa: PT031
        for _ in range(3):
            checkpoint(lambda t: t.sin(), x, policy=save_ops("aten.mm"))
            checkpoint(partial(lambda t: t.sin()), x, policy=save_ops("aten.mm"))
    assert len(told) == 2


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
def test_models_are_not_held(x):
    """A model and its warnings are freed when the user drops it."""
    policy = save_ops("aten.mm")
    for _ in range(3):
        stack = nn.Sequential(nn.Linear(4, 4))
        checkpoint(stack, x, policy=policy).sum().backward()
        gone = weakref.ref(stack)
        del stack
        assert gone() is None
    assert uses.of(policy).known == {}


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (save_ops(ATTENTION), r"'@attention' match .* What ran: 'aten\.addmm', 'aten"),
        (lambda ctx, op, *args, **kwargs: op is torch.ops.aten.sin, "operators are overloads, as"),
        (save_ops(*(f"b.x{n}" for n in range(10))), r"'b\.x7' and 2 more match nothing"),
    ],
    ids=["group", "packet", "many"],
)
def test_warning_says_what_the_entry_is(x, policy, said):
    """What ran is listed if no name is close."""
    with pytest.warns(UnmatchedEntryWarning, match=said):
        checkpoint(_Stack(), x, policy=policy)
