"""Plans: what is shown before anything is changed, and what applying does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

from ckpt_wrap import (
    CheckpointImpl,
    ModuleError,
    OptionError,
    Plan,
    PolicyError,
    by_class,
    by_name,
    by_size,
    checkpoint_wrapper,
    every_nth,
    make_plan,
    unwrap,
)


class Block(nn.Sequential):
    pass


def _build():
    blocks = [Block(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(5, 4), nn.ModuleList(blocks), nn.Linear(4, 5))


FORMS = {
    "class": (by_class(Block), ["1.0", "1.1", "1.2", "1.3"]),
    "name": (by_name("1.?"), ["1.0", "1.1", "1.2", "1.3"]),
    "every second": (every_nth(2, of=by_class(Block)), ["1.0", "1.2"]),
    "from the second": (every_nth(3, of=by_class(Block), start=1), ["1.1"]),
    "size": (by_size(at_least=40, at_most=80) & ~by_name("1.*.*"), ["1.0", "1.1", "1.2", "1.3"]),
    "or": (by_name("2") | by_name("0"), ["0", "2"]),
    "and": (by_class(nn.Linear) & by_name("1.3*"), ["1.3.0", "1.3.2"]),
    "not": (~by_class(nn.Linear, nn.ReLU, Block), ["0"]),
    "function": (lambda info: info.depth == 1 and info.index == 2, ["2"]),
    "torch class": (ModuleWrapPolicy({nn.Embedding}), ["0"]),
    "torch custom": (
        CustomPolicy(lambda m: isinstance(m, nn.ReLU)),
        [f"1.{i}.1" for i in range(4)],
    ),
    "torch function": (
        partial(size_based_auto_wrap_policy, min_num_params=70),
        ["1.0", "1.1", "1.2", "1.3"],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_policies_select(form):
    """Every form of policy selects what it says, in the order of the model."""
    policy, expected = FORMS[form]
    model = _build()
    before = [type(m) for m in model.modules()]
    assert list(make_plan(model, policy).names) == expected
    assert [type(m) for m in model.modules()] == before


def test_options_come_together():
    """Options of the plan, then of the left policy, then of the right."""

    def policy(info):
        return info.name == "2" and {"early_stop": False}

    plan = make_plan(_build(), policy, preserve_rng_state=False)
    assert plan.steps[0].options == {"preserve_rng_state": False, "early_stop": False}


def test_apply_is_idempotent_and_changes_only_the_planned():
    """Applied twice, the planned modules are changed once and the others not at all."""
    model = _build()
    plan = make_plan(model, by_class(Block), checkpoint_impl=CheckpointImpl.REENTRANT)
    assert plan.apply(plan.apply(model)) is model
    assert [type(b).__mro__[1] for b in model[1]] == [Block] * 4
    assert type(model[2]) is nn.Linear
    x = torch.randn(2, 4, requires_grad=True)
    model[1][0](x).sum().backward()
    unwrap(model)
    assert [type(b) for b in model[1]] == [Block] * 4


def test_a_shared_module_is_planned_once_under_all_its_names():
    """The table shows the other names, and a glob may match any of them."""
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleDict({"c": shared})})
    plan = make_plan(model, by_name("b.c"))
    assert plan.names == ("a",)
    assert plan.steps[0].aliases == ("b.c",)
    assert "a = b.c" in str(plan)


def test_wrapped_modules_have_their_plain_names():
    """Planning over nested wrappers sees the modules inside them."""
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    plan = make_plan(model, by_class(nn.Linear))
    assert plan.names == ("0",)
    plan.apply(model)
    assert type(model[0]._checkpoint_wrapped_module).__mro__[1] is nn.Linear


def test_the_model_itself_only_if_asked_for():
    """The root is left out unless `include_root`."""
    model = nn.Linear(2, 2)
    with pytest.raises(PolicyError, match="selects no module"):
        make_plan(model, by_class(nn.Linear))
    assert make_plan(model, by_class(nn.Linear), include_root=True).names == ("",)


def test_digest_tells_plans_apart():
    """Equal for equal plans of equal models, different for another option or module."""
    digest = make_plan(_build(), by_class(Block)).digest
    assert make_plan(_build(), by_class(Block)).digest == digest
    assert make_plan(_build(), by_class(Block), early_stop=False).digest != digest
    assert make_plan(_build(), by_name("1.0")).digest != digest


def test_offload_plans(tmp_path):
    """The other action, with its own options."""
    model = _build()
    make_plan(model, by_class(Block), action="offload", to=str(tmp_path), min_bytes=0).apply(model)
    model[1][0](torch.randn(2, 4, requires_grad=True)).sum().backward()


@pytest.mark.parametrize(
    ("policy", "options", "error", "message"),
    [
        (
            by_name("1.x"),
            {},
            PolicyError,
            r"policy for '1.x' selects no module of Sequential.*'1.3'",
        ),
        (by_name("1.x") | by_name("head"), {}, PolicyError, "policy for '1.x', 'head' selects no"),
        (
            by_name("1.*") & by_name("head"),
            {},
            PolicyError,
            r"for '1.\*', 'head' selects no",
        ),
        (by_class(nn.LayerNorm), {}, PolicyError, "Closest candidates: "),
        (lambda info: False, {}, PolicyError, "Closest candidates: '0', 'Embedding', '1'"),
        (lambda info: 3, {}, PolicyError, "decision for module '0' is 3"),
        (3, {}, PolicyError, "policy 3, but it must be a Policy"),
        (by_class(Block), {"action": "both"}, OptionError, "action is 'both'"),
        (
            by_class(Block),
            {"erly_stop": True},
            OptionError,
            r"option 'erly_stop' is unknown.*module '1.0'",
        ),
        (
            by_class(Block),
            {"action": "offload", "too": "x"},
            OptionError,
            "unexpected keyword argument 'too'",
        ),
    ],
)
def test_mistakes_are_explained_and_change_nothing(policy, options, error, message):
    """Each mistake names what is wrong; the model is as it was."""
    model = _build()
    with pytest.raises(error, match=message):
        make_plan(model, policy, **options)
    assert type(model[1][0]) is Block


def test_a_plan_with_a_module_twice_is_applied():
    """The later options count, as when it is changed twice."""
    model = nn.Sequential(nn.ReLU())
    step = make_plan(model, by_name("0")).steps[0]
    assert unwrap(Plan("checkpoint", (step, step)).apply(model)[0]) is model[0]


def test_applying_to_another_model_names_the_missing_module():
    """A plan whose module is missing changes nothing at all."""
    plan = make_plan(_build(), by_name("1.0", "1.3"))
    other = nn.Sequential(nn.Embedding(5, 4), nn.ModuleList([Block(nn.Linear(4, 4))]))
    with pytest.raises(PolicyError, match=r"module '1.3' is missing in Sequential"):
        plan.apply(other)
    assert type(other[1][0]) is Block


def test_a_module_that_cannot_change_leaves_all_as_they_are():
    """The first planned module is not changed when the second cannot be."""
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    with pytest.raises(ModuleError, match=r"Plan.apply: module '1' \(LazyLinear\) is lazy"):
        make_plan(model, by_class(nn.Linear)).apply(model)
    assert type(model[0]) is nn.Linear
