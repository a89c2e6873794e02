"""Rules save what their arguments describe, and combine; invalid arguments are refused."""

from __future__ import annotations

import functools

import pytest
import torch

from sac_policies import (
    MATMULS,
    ConflictError,
    PolicyError,
    first_match,
    offload,
    recompute_all,
    recompute_ops,
    report,
    save_all,
    save_by_bytes,
    save_by_flops,
    save_every_nth,
    save_modules,
    save_named,
    save_ops,
    scoped,
)
from sac_policies.policies import Decision, OpView, as_policy
from sac_policies.policies._rules import is_inside

MM, SIN = torch.ops.aten.mm.default, torch.ops.aten.sin.default
SAVE, OFFLOAD, RECOMPUTE = Decision.SAVE, Decision.OFFLOAD, Decision.RECOMPUTE


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: save_ops(), "no operator is given"),
        (lambda: save_ops(3), "entry 3 is a int"),
        (lambda: save_every_nth("aten.mm", n=2, phase=2), "n 2 and phase 2 pick no call"),
        (lambda: save_every_nth("aten.mm", n="2"), "n '2' and phase 0 pick no call"),
        (lambda: save_by_bytes(at_least=2, at_most=1), "bounds 2 to 1 bytes"),
        (lambda: save_by_bytes(at_least="1 KiB"), "bounds '1 KiB' to None"),
        (lambda: save_by_flops(at_least=-1), "at_least -1 is not a count"),
        (lambda: save_named(), "no name is given"),
        (lambda: scoped("attn", save_ops("aten.mm")), "'attn' is a str, but a policy is needed"),
        (lambda: first_match(), "no rules are given"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(make, message):
    """Rules that cannot match anything are refused when they are made."""
    with pytest.raises(PolicyError, match=message):
        make()


@pytest.mark.parametrize(
    ("policy", "of_mm", "of_sin"),
    [
        (recompute_all(), RECOMPUTE, RECOMPUTE),
        (save_ops("aten.mm"), SAVE, None),
        (recompute_ops("aten.mm"), RECOMPUTE, None),
        (offload("aten.mm"), OFFLOAD, None),
        (offload(save_all()), OFFLOAD, OFFLOAD),
        (save_ops("aten.mm") | recompute_ops("aten.mm"), SAVE, None),
        (save_ops("aten.mm") & save_all(), SAVE, None),
        (save_ops("aten.sin") & save_all(), None, SAVE),
        (~save_ops("aten.mm"), RECOMPUTE, SAVE),
        (~offload("aten.mm"), RECOMPUTE, SAVE),
        (first_match(recompute_ops("aten.mm"), save_all()), RECOMPUTE, SAVE),
    ],
    ids=str,
)
def test_rules_and_combinations(policy, of_mm, of_sin):
    """`|` takes the larger decision, `&` the smaller, `~` inverts, `first_match` stops at one."""
    assert [policy.decide(OpView(op, 0)) for op in (MM, SIN)] == [of_mm, of_sin]
    assert [policy.constant(op) for op in (MM, SIN)] == [of_mm, of_sin]


def test_combinations_are_shown_as_they_are_written():
    """In messages and reports."""
    a, b = save_ops("aten.mm"), recompute_all()
    assert repr(~(a | b) & b) == f"(~({a!r} | {b!r}) & {b!r})"
    assert repr(first_match(offload(b), a)) == f"first_match(offload({b!r}), {a!r})"


def test_saving_and_offloading_one_value_is_a_conflict():
    """A value is kept in one place; the error names the operator and the rule."""
    with pytest.raises(ConflictError, match=r"aten\.mm\.default is saved by one side .*py:\d+ in"):
        (save_ops("aten.mm") | offload("aten.mm")).decide(OpView(MM, 0))


@pytest.mark.parametrize("other", ["aten.sin", lambda ctx, op: True, None])
def test_only_policies_combine(other):
    """For other operands, Python raises the TypeError of `|` and `&`."""
    with pytest.raises(TypeError, match="unsupported operand"):
        save_ops("aten.mm") | other
    with pytest.raises(TypeError, match="unsupported operand"):
        save_ops("aten.mm") & other


def test_policies_of_one_list_or_function_are_equal():
    """They share one table of recorders and warn once."""
    for given in (["aten.mm"], test_only_policies_combine):
        assert as_policy(given) == as_policy(given)
        assert hash(as_policy(given)) == hash(as_policy(given))


@pytest.mark.parametrize(
    ("at_least", "at_most", "saved"),
    [(0, None, [4, 8, 16]), (8, None, [8, 16]), (0, 8, [4, 8]), (8, 8, [8])],
)
def test_bounds_of_bytes_are_both_inside(at_least, at_most, saved):
    """Without an upper bound, every size from the lower bound on matches."""
    policy = save_by_bytes(at_least=at_least, at_most=at_most)
    answers = {n: policy.decide(OpView(SIN, 0, torch.ones(n // 4))) for n in (4, 8, 16)}
    assert [n for n, answer in answers.items() if answer is SAVE] == saved


@pytest.mark.parametrize(("phase", "kept"), [(0, [0, 2, 0]), (1, [1, 1])])
def test_every_nth_counts_each_operator_from_its_phase(phase, kept):
    """Of three matmuls, n=2 saves the first and third, or the second; sin counts by itself."""
    p, q = (torch.ones(4, 4, requires_grad=True) for _ in range(2))
    policy = save_every_nth("aten.mm", "aten.sin", n=2, phase=phase)
    rows = report(lambda p, q: ((p @ q).sin() @ q).sin() @ q, p, q, policy=policy).kept
    assert [row.index for row in sorted(rows, key=lambda row: row.op)] == kept


def test_scope_restricts_a_policy(make_block, x):
    """A scoped rule only decides inside its modules."""
    rows = report(make_block(), x, policy=scoped(save_ops(MATMULS), "qkv", "out")).kept
    assert [row.module for row in rows] == ["qkv", "out"]


@pytest.mark.parametrize("wrap", [lambda b: b, lambda b: b.forward, functools.partial])
def test_paths_start_at_the_module_behind_a_call(wrap, make_block, x):
    """Also for a method and a partial."""
    rows = report(wrap(make_block()), x, policy=save_modules("up")).kept
    assert {row.module for row in rows} == {"up"}


@pytest.mark.parametrize(
    ("path", "glob", "inside"),
    [
        ("attn", "attn", True),
        ("blocks.3.attn.out", "attn", True),
        ("blocks.3.attn.out", "blocks.*.attn", True),
        ("blocks.3.attn.out", "blocks.?", True),
        ("attention", "attn", False),
        ("", "attn", False),
        ("L['self'].attn", "attn", True),
    ],
)
def test_glob_matches_a_run_of_components(path, glob, inside):
    """A glob matches a module and everything below it, wherever the path starts."""
    assert is_inside(path, glob) is inside


def test_modules_need_a_module():
    """A plain function has no module paths."""
    x = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(PolicyError, match="function is neither a module"):
        report(torch.mm, x, x, policy=save_modules("up"))
