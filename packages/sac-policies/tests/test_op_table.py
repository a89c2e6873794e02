"""Contexts engine: what is done at one operator, by its facts and the policy; no view is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from sac_policies import (
    EngineError,
    checkpoint,
    offload,
    recompute_all,
    save_all,
    save_by_bytes,
    save_every_nth,
    save_named,
    save_ops,
)
from sac_policies.engines._engine_disabled import RangeHandler
from sac_policies.engines._fsdp import RANGE_OPS
from sac_policies.engines.contexts._op_table import OpHandler, OpTable, op_table_of, waiting

from ._contexts import PRODUCTS, ab, contexts

aten = torch.ops.aten


@pytest.mark.parametrize("policy", [recompute_all(), save_ops("flex_attention")])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_higher_order_operator_runs_in_a_region(policy):
    """In eager code too; here its inputs need no gradient, which it has on no CPU."""
    q, w = torch.linspace(-1, 1, 256).reshape(1, 1, 16, 16), torch.ones(16, requires_grad=True)

    def body(t):
        return (flex_attention(q, q, q) * t).sin()

    plain = torch.autograd.grad(body(w).sum(), w)
    kept = torch.autograd.grad(contexts(body, w, policy=policy).sum(), w)
    assert torch.equal(plain[0], kept[0])


@pytest.mark.parametrize(
    "policy", [recompute_all(), save_ops("aten.mm"), save_all()], ids=["none", "mm", "all"]
)
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.unsqueeze_(0),
        lambda t: t.t_(),
        lambda t: t.transpose_(0, 1),
        lambda t: t.unsqueeze_(1).squeeze_(1),
        lambda t: t.as_strided_((3, 4), (1, 3)),
    ],
    ids=["unsqueeze", "t", "transpose", "squeeze", "as_strided"],
)
def test_operators_that_change_a_shape_in_place(policy, change):
    """What is kept of the value before them is kept in its own shape."""
    w = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    x = torch.linspace(0, 1, 12).view(4, 3).requires_grad_()

    def function(t):
        made = t @ w @ w.t()
        return change(made).sin()

    plain = torch.autograd.grad(function(x).sum(), [x, w])
    out = checkpoint(function, x, policy=policy, engine="contexts")
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), [x, w]), plain))


def _through_view(p, q):
    y = p @ q
    y.view(-1).mul_(2)
    return y.sin()


def _under_view(p, q):
    y = p @ q
    row = y[1]
    y.mul_(2)
    return row.sin()


def _into_row(p, q):
    y = p @ q
    y[0] = 3.0
    return y.sin() * y.t()


VIEWS = ("aten.view", "aten.select.int", "aten.t")


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("body", [_through_view, _under_view, _into_row])
@pytest.mark.parametrize(
    "policy",
    [
        save_all(),
        save_ops(*VIEWS),
        save_ops("aten.mm", *VIEWS),
        offload(save_all()),
        save_by_bytes(),
        save_by_bytes() | save_named("none", missing_ok=True),
    ],
    ids=["all", "views", "both", "offload", "asked", "asked with names"],
)
def test_views_stay_views_of_what_is_written_to(body, policy, gradients, equal):
    """A saved view and its saved base see each other's changes in the recomputation too."""
    a, b = ab()
    found = gradients(lambda p, q: contexts(body, p, q, policy=policy), a, b)
    assert equal(found, gradients(body, a, b))


def _table(policy: Any, every: bool = False) -> OpTable:
    return OpTable(policy, every=every)


@pytest.mark.parametrize(
    ("op", "visited"),
    [
        (aten.mm.default, True),
        (aten.sin.default, False),
        (aten.bernoulli.default, True),
        (aten.relu_.default, True),
        (aten.view.default, False),
        (aten.detach.default, False),
    ],
    ids=str,
)
def test_operators_that_need_care_are_visited(op, visited):
    """What may be kept, draws or writes; the others cost one look."""
    assert (_table(PRODUCTS)[op] is not None) is visited


@pytest.mark.parametrize(
    ("policy", "visited"),
    [
        (recompute_all(), False),
        (save_all(), True),
        (offload(save_all()), True),
        (save_by_bytes(), True),
        (save_every_nth("aten.sin", n=2), True),
        (save_named("a"), True),
    ],
    ids=str,
)
def test_function_is_visited_where_the_policy_may_keep_or_counts_it(policy, visited):
    """Where a policy reads names every operator is: the name comes after."""
    assert (_table(policy)[aten.sin.default] is not None) is visited


def test_debugging_visits_all_but_bookkeeping():
    """Torch runs another number of these in a recomputation."""
    table = _table(recompute_all(), every=True)
    assert table[aten.sin.default] is not None
    assert table[aten.detach.default] is None


def test_view_is_visited_only_to_ask_what_depends_on_the_call():
    """A constant answer for it is none; nothing is kept of it either way (Rule 1)."""
    assert _table(save_all())[aten.t.default] is None
    assert _table(save_by_bytes())[aten.t.default] is not None


def test_operators_are_sorted_by_what_they_read_and_make():
    """Views and what is kept read nothing again; writes and views make nothing."""
    table = _table(PRODUCTS)
    for op in (aten.mm.default, aten.sin.default, aten.t.default, aten.relu_.default):
        table[op]
    table[aten.detach.default]
    unread = {op for op in table.traits if not table.traits[op].rereads}
    assert unread == {aten.mm.default, aten.t.default}
    assert {op for op in table.traits if table.traits[op].views} == {aten.t.default}
    makes = {op for op in table.traits if table.traits[op].makes}
    assert makes == {aten.mm.default, aten.sin.default}


def test_marks_of_ranges_read_what_they_are_given_and_make_nothing():
    """They return what they were given, whatever a policy says of them."""
    for policy in (PRODUCTS, save_all()):
        table = _table(policy)
        for op in RANGE_OPS:
            assert type(table[op]) is RangeHandler
            assert table.traits[op] == (True, False, False, True)


def test_equal_policies_have_one_table():
    """All regions share what was worked out."""
    assert op_table_of(save_ops("aten.mm")) is op_table_of(save_ops("aten.mm"))
    assert op_table_of(save_ops("aten.mm")) is not op_table_of(save_ops("aten.bmm"))


def test_region_that_waits_sees_writes_only():
    """They may be to what it keeps."""
    assert waiting[aten.relu_.default].op is aten.relu_.default
    assert waiting[aten.mm.default] is None
    assert waiting[aten.bernoulli.default] is None


def test_operator_that_writes_to_several_cannot_be_kept():
    """The error names it, what it does and both ways out."""
    mean, var = torch.zeros(8), torch.ones(8)

    def body(t):
        op = aten._native_batch_norm_legit.default
        return op(t, None, None, mean, var, True, 0.1, 1e-5)[0].sin()

    a, _ = ab()
    with pytest.raises(
        EngineError,
        match=r"_native_batch_norm_legit.default writes to 2 arguments and returns tuple, but .*"
        r"Recompute it, or keep what reads its result\.",
    ):
        contexts(body, a, policy=save_ops("aten._native_batch_norm_legit"))


def test_calls_of_compiled_callables_are_counted_each_for_itself():
    """One operator runs all of them; other operators are counted by themselves."""
    cond = OpHandler(torch.ops.higher_order.cond, recompute_all())
    assert cond.key((len, 1)) == (torch.ops.higher_order.cond, len)
    assert cond.key((torch.ones(1), 1)) is torch.ops.higher_order.cond
    assert cond.key(()) is torch.ops.higher_order.cond
    assert OpHandler(aten.mm.default, PRODUCTS).key((len,)) is aten.mm.default
