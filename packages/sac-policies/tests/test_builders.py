"""The rule builders make the rules that they describe, and refuse invalid arguments."""

from __future__ import annotations

import pytest
import torch

from sac_policies import (
    PolicyError,
    offload,
    recompute_all,
    recompute_ops,
    save_all,
    save_by_bytes,
    save_by_flops,
    save_by_shape,
    save_every_nth,
    save_modules,
    save_named,
    save_ops,
    scoped,
)
from sac_policies.policies import Decision, OpView


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: save_ops(), "no operator is given"),
        (lambda: save_ops(3), "entry 3 is a int"),
        (lambda: save_ops("@matmul"), "Use one of @matmuls"),
        (lambda: save_every_nth("aten.mm", n=2, phase=2), "n 2 and phase 2 pick no call"),
        (lambda: save_by_bytes(at_least=2, at_most=1), "bounds 2 to 1 bytes"),
        (lambda: save_by_flops(at_least=-1), "at_least -1 is not a count"),
        (lambda: save_named(), "no name is given"),
        (lambda: save_named(3), "name 3 is a int"),
        (lambda: save_ops(""), "entry '' is a str"),
        (lambda: save_modules(["a", "b"]), r"module path \['a', 'b'\] is a list"),
        (lambda: scoped("attn", save_ops("aten.mm")), "'attn' is a str, but a policy is needed"),
        (lambda: save_every_nth("aten.mm", n="2"), "n '2' and phase 0 pick no call"),
        (lambda: save_by_bytes(at_least="1 KiB"), "bounds '1 KiB' to None"),
        (lambda: save_by_bytes(at_most=1.5), "bounds 0 to 1.5"),
        (lambda: save_by_flops(at_least="1"), "at_least '1' is not a count"),
        (lambda: save_by_shape("a"), "shape 'a' is not a shape"),
        (lambda: save_by_shape((1, "a")), r"shape \(1, 'a'\) is not a shape"),
        (lambda: save_by_shape(), "no shape is given"),
        (lambda: save_modules(), "no module path is given"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(make, message):
    """Rules that cannot match anything are refused when they are made."""
    with pytest.raises(PolicyError, match=message):
        make()


MM, SIN = torch.ops.aten.mm.default, torch.ops.aten.sin.default


@pytest.mark.parametrize(
    ("policy", "of_mm", "of_sin"),
    [
        (save_all(), Decision.SAVE, Decision.SAVE),
        (recompute_all(), Decision.RECOMPUTE, Decision.RECOMPUTE),
        (save_ops("aten.mm"), Decision.SAVE, None),
        (recompute_ops("aten.mm"), Decision.RECOMPUTE, None),
        (offload("aten.mm"), Decision.OFFLOAD, None),
        (offload(save_all()), Decision.OFFLOAD, Decision.OFFLOAD),
    ],
    ids=str,
)
def test_rule_of_operators_answers_for_those_named(policy, of_mm, of_sin):
    """The rule has no answer for other operators."""
    assert [policy.decide(OpView(op, 0)) for op in (MM, SIN)] == [of_mm, of_sin]


@pytest.mark.parametrize(
    ("at_least", "at_most", "saved"),
    [(0, None, [4, 8, 16]), (8, None, [8, 16]), (0, 8, [4, 8]), (8, 8, [8])],
)
def test_bounds_of_bytes_are_both_inside(at_least, at_most, saved):
    """Without an upper bound, every size from the lower bound on matches."""
    policy = save_by_bytes(at_least=at_least, at_most=at_most)
    answers = {n: policy.decide(OpView(SIN, 0, torch.ones(n // 4))) for n in (4, 8, 16)}
    assert [n for n, answer in answers.items() if answer is Decision.SAVE] == saved


def test_shapes_may_be_lists_and_are_kept_as_tuples():
    """The rule can still be compared and hashed."""
    policy = save_by_shape([None, 3], ())
    assert policy == save_by_shape((None, 3), ())
    assert hash(policy) == hash(save_by_shape((None, 3), ()))


def test_modules_are_a_scope_of_saving_all():
    """One rule, written in two ways."""
    assert save_modules("attn") == scoped(save_all(), "attn")
