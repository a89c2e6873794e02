"""The functions that make rules make what they say, and refuse what no rule can be."""

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
from sac_policies.policies import Decision, OpView, as_policy


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: save_ops("a" * 1001),
        lambda: save_named("a" * 1001),
        lambda: save_modules("a" * 1001),
        lambda: save_ops(*["b.x"] * 4097),
        lambda: save_named(*["b"] * 4097),
        lambda: as_policy(["aten.*"] * 4097),
    ],
)
def test_builders_have_the_same_limits(make):
    """What text may not say, code may not either."""
    with pytest.raises(PolicyError, match="are the most"):
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
    """And has no answer for others."""
    assert [policy.decide(OpView(op, 0)) for op in (MM, SIN)] == [of_mm, of_sin]


@pytest.mark.parametrize(
    ("at_least", "at_most", "saved"),
    [(0, None, [4, 8, 16]), (8, None, [8, 16]), (0, 8, [4, 8]), (8, 8, [8])],
)
def test_bounds_of_bytes_are_both_inside(at_least, at_most, saved):
    """Without an upper one every size from the lower on."""
    policy = save_by_bytes(at_least=at_least, at_most=at_most)
    answers = {n: policy.decide(OpView(SIN, 0, torch.ones(n // 4))) for n in (4, 8, 16)}
    assert [n for n, answer in answers.items() if answer is Decision.SAVE] == saved


def test_shapes_may_be_lists_and_are_kept_as_tuples():
    """A rule stays a value that can be compared and hashed."""
    policy = save_by_shape([None, 3], ())
    assert policy == save_by_shape((None, 3), ())
    assert hash(policy) == hash(save_by_shape((None, 3), ()))


@pytest.mark.parametrize("n", [1, 3])
def test_last_phase_is_one_below_the_distance(n):
    """Phases from 0 to n - 1 pick calls."""
    assert save_every_nth("aten.mm", n=n, phase=n - 1).phase == n - 1
    with pytest.raises(PolicyError, match=f"phase {n} pick no call"):
        save_every_nth("aten.mm", n=n, phase=n)


@pytest.mark.parametrize(
    "make", [save_named, save_modules, lambda *a, **k: scoped(save_all(), *a, **k)]
)
def test_missing_names_are_errors_unless_allowed(make):
    """What is asked for is in the rule."""
    assert make("a").missing_ok is False
    assert make("a", missing_ok=True).missing_ok is True


def test_modules_are_a_scope_of_saving_all():
    """One rule, spelt in two ways."""
    assert save_modules("attn") == scoped(save_all(), "attn")


def test_most_entries_are_accepted():
    """The limit itself is none too many."""
    assert len(save_ops(*["b.*"] * 4096).entries) == 4096
