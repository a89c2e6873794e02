"""Plans: what is shown before anything is changed, and what applying does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_wrap import (
    CheckpointImpl,
    ModuleError,
    OptionError,
    Plan,
    PolicyError,
    checkpoint_wrapper,
    make_plan,
    unwrap,
)


class Block(nn.Sequential):
    pass


def _build():
    blocks = [Block(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(5, 4), nn.ModuleList(blocks), nn.Linear(4, 5))


def _is_block(name, module):
    return isinstance(module, Block)


def test_rule_selects_by_name_and_module():
    """In the order of the model, which is not changed."""
    model = _build()
    before = [type(m) for m in model.modules()]
    assert make_plan(model, _is_block).names == ("1.0", "1.1", "1.2", "1.3")
    assert make_plan(model, lambda name, _: name in ("2", "0")).names == ("0", "2")
    assert make_plan(model, lambda name, _: {} if name == "2" else None).names == ("2",)
    assert [type(m) for m in model.modules()] == before


def test_options_of_the_rule_are_added_to_those_of_the_plan():
    """The rule's win."""

    def rule(name, module):
        return name == "2" and {"early_stop": False}

    plan = make_plan(_build(), rule, preserve_rng_state=False, early_stop=True)
    assert plan.steps[0].options == {"preserve_rng_state": False, "early_stop": False}


def test_apply_is_idempotent_and_changes_only_the_planned():
    """Applied twice, the planned modules are changed once and the others not at all."""
    model = _build()
    plan = make_plan(model, _is_block, checkpoint_impl=CheckpointImpl.REENTRANT)
    assert plan.apply(plan.apply(model)) is model
    assert [type(b).__mro__[1] for b in model[1]] == [Block] * 4
    assert type(model[2]) is nn.Linear
    x = torch.randn(2, 4, requires_grad=True)
    model[1][0](x).sum().backward()
    unwrap(model)
    assert [type(b) for b in model[1]] == [Block] * 4


def test_table_groups_equal_modules_of_one_parent():
    """Their names, count, parameters and options."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(6)], nn.Linear(2, 3))
    plan = make_plan(model, lambda name, _: {"early_stop": False} if name == "6" else True)
    assert str(plan) == (
        "action      modules       class   count  parameters  options\n"
        "checkpoint  0, 1, ..., 5  Linear      6          36\n"
        "checkpoint  6             Linear      1           9  early_stop=False"
    )


def test_shared_module_is_planned_once():
    """Under its first name."""
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleDict({"c": shared})})
    assert make_plan(model, lambda _, m: isinstance(m, nn.Linear)).names == ("a",)


def test_wrapped_modules_have_their_plain_names():
    """Planning over nested wrappers sees the modules inside them."""
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    plan = make_plan(model, lambda _, module: isinstance(module, nn.Linear))
    assert plan.names == ("0",)
    plan.apply(model)
    assert type(model[0]._checkpoint_wrapped_module).__mro__[1] is nn.Linear


@pytest.mark.parametrize("wrap", [lambda m: m, checkpoint_wrapper])
def test_rule_is_not_asked_about_the_model_itself(wrap):
    """That is what `checkpoint_` is for."""
    with pytest.raises(PolicyError, match="selects no module"):
        make_plan(wrap(nn.Linear(2, 2)), lambda *_: True)


def test_digest_tells_plans_apart():
    """Equal for equal plans of equal models, different for another option or module."""
    digest = make_plan(_build(), _is_block).digest
    assert make_plan(_build(), _is_block).digest == digest
    assert make_plan(_build(), _is_block, early_stop=False).digest != digest
    assert make_plan(_build(), lambda name, _: name == "1.0").digest != digest


def test_offload_plans(tmp_path):
    """The other action, with its own options."""
    model = _build()
    make_plan(model, _is_block, action="offload", to=str(tmp_path), min_bytes=0).apply(model)
    model[1][0](torch.randn(2, 4, requires_grad=True)).sum().backward()


@pytest.mark.parametrize(
    ("rule", "options", "error", "message"),
    [
        (lambda *_: False, {}, PolicyError, "must select at least one. Classes.*: Embedding, "),
        (lambda *_: 3, {}, PolicyError, "the rule returned 3 for module '0'"),
        (3, {}, PolicyError, "rule is 3, but it must be a function"),
        (_is_block, {"action": "both"}, OptionError, "action is 'both'"),
        (_is_block, {"erly_stop": True}, OptionError, "'erly_stop' is unknown.*module '1.0'"),
        (
            _is_block,
            {"action": "offload", "too": "x"},
            OptionError,
            "unexpected keyword argument 'too'",
        ),
    ],
)
def test_mistakes_are_explained_and_change_nothing(rule, options, error, message):
    """Each mistake names what is wrong; the model is as it was."""
    model = _build()
    with pytest.raises(error, match=message):
        make_plan(model, rule, **options)
    assert type(model[1][0]) is Block


def test_plan_with_a_module_twice_is_applied():
    """The later options count, as when it is changed twice."""
    model = nn.Sequential(nn.ReLU())
    (step,) = make_plan(model, lambda *_: True).steps
    assert unwrap(Plan((step, step)).apply(model)[0]) is model[0]


def test_applying_to_another_model_names_the_missing_module():
    """A plan whose module is missing changes nothing at all."""
    plan = make_plan(_build(), lambda name, _: name in ("1.0", "1.3"))
    other = nn.Sequential(nn.Embedding(5, 4), nn.ModuleList([Block(nn.Linear(4, 4))]))
    with pytest.raises(PolicyError, match=r"module '1.3' is missing in Sequential"):
        plan.apply(other)
    assert type(other[1][0]) is Block


def test_module_that_cannot_change_leaves_all_as_they_are():
    """The first planned module is not changed when the second cannot be."""
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    with pytest.raises(ModuleError, match=r"Plan.apply: module '1' \(LazyLinear\) is lazy"):
        make_plan(model, lambda *_: True).apply(model)
    assert type(model[0]) is nn.Linear
