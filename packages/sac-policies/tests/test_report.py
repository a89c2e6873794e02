"""Reports list kept values with place, rule and bytes, and entries that matched nothing."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from sac_policies import (
    checkpoint_name,
    first_match,
    recompute_all,
    report,
    save_all,
    save_by_bytes,
    save_every_nth,
    save_named,
    save_ops,
)
from sac_policies.policies import Decision


def _body(p, q):
    return (p @ q).sin() @ q


def _leaves():
    torch.manual_seed(0)
    return torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)


def test_row_names_operator_rule_bytes_and_line():
    """Each row has all facts about one call."""
    row = report(_body, *_leaves(), policy=save_ops("aten.mm")).rows[0]
    assert (row.op, row.index, row.decision) == ("aten.mm.default", 0, Decision.SAVE)
    assert row.rule == repr(save_ops("aten.mm"))
    assert row.out_bytes == 8 * 8 * 4
    assert row.flops == 2 * 8**3
    assert row.line.endswith("in _body")


def test_function_that_raises_leaves_torch_as_it_was():
    """The caller's error is raised; torch.compile works while it is held and afterwards."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    def fail(p, q):
        raise KeyError(p @ q)

    with pytest.raises(KeyError) as held:
        report(fail, *_leaves(), policy=save_ops("aten.mm"))
    torch.compile(lambda t: t.sin(), backend=backend)(torch.ones(2))
    assert held.traceback
    assert len(compiled) == 1
    del held
    torch.compile(lambda t: t.cos(), backend=backend)(torch.ones(2))
    assert len(compiled) == 2


def test_named_tensor_has_a_row_whatever_the_policy_reads():
    """This shows which values could be kept by name."""

    def body(p, q):
        return checkpoint_name((p @ q).sin(), "wave") @ q

    rows = report(body, *_leaves(), policy=save_ops("aten.mm")).rows
    assert [row.label for row in rows if row.label] == ["wave"]


def test_views_of_one_storage_are_counted_once():
    """If everything is saved, a view and its base count once."""
    p, q = _leaves()
    body = lambda a, b: (a @ b).view(64).sin()  # noqa: E731 - one expression
    assert report(body, p, q, policy=save_all()).held_bytes == 256


def test_recomputed_flops_are_those_of_what_is_not_kept():
    """Recomputing both matmuls costs the FLOPs of both."""
    p, q = _leaves()
    assert report(_body, p, q, policy=recompute_all()).recomputed_flops == 2 * 2 * 8**3
    assert report(_body, p, q, policy=save_ops("aten.mm")).recomputed_flops == 0


def test_rule_is_the_innermost_that_decides():
    """For a combined policy, the row names the part that decided."""
    policy = first_match(save_by_bytes(at_least=10**6), save_ops("aten.sin"))
    kept = report(_body, *_leaves(), policy=policy).kept
    assert [row.rule for row in kept] == [repr(save_ops("aten.sin"))]


def test_name_that_no_tensor_has_is_no_error():
    """The policy may be meant for other models too."""
    for _ in range(2):
        assert report(_body, *_leaves(), policy=save_named("nobody")).rows


def test_text_says_what_is_saved_and_recomputed():
    """str() of a report is a few lines: kinds of operators with their bytes."""
    lines = str(report(_body, *_leaves(), policy=save_every_nth("aten.mm", n=1))).splitlines()
    assert lines == [
        "1 matmul saved, 256 bytes",
        "1 mm not held: backward does not need it",
        "1 operator recomputed",
        "256 bytes held in all",
    ]


def test_report_lists_what_is_held():
    """Rows add up to the held bytes, and are equal in each call."""
    x, w = (torch.randn(64, 64, requires_grad=True) for _ in range(2))

    def run(t):
        y = F.dropout(t @ w, 0.5).sin()
        return ((y @ w).sin() + y.argmax()) @ w

    found = report(run, x, policy=save_ops("aten.mm"))
    again = report(run, x, policy=save_ops("aten.mm"))
    assert [row.held_bytes for row in found.rows] == [row.held_bytes for row in again.rows]
    assert sum(row.held_bytes for row in found.rows) == found.held_bytes
    by_op = {(row.op, row.index): row for row in found.rows}
    assert [by_op["aten.mm.default", at].read for at in range(3)] == [True, True, False]
    assert [(row.op, row.index) for row in found.unread] == [("aten.mm.default", 2)]
    assert by_op["aten.mm.default", 0].held_bytes == 64 * 64 * 4
    assert "random" in by_op["aten.bernoulli_.float", 0].why
    assert "1 mm not held: backward does not need it" in str(found)


def test_report_says_why_results_are_held():
    """Integers, values computed under no_grad, and values that a gradient inside recomputes."""
    x = torch.randn(64, 64, requires_grad=True)

    def run(t):
        with torch.no_grad():
            scale = t.exp()
        values, places = (t * scale).topk(4, -1)
        return values.sin() * t.gather(1, places)

    found = report(run, x, policy=recompute_all())
    whys = {row.op: row.why for row in found.kept_anyway}
    assert whys == {
        "aten.exp.default": "it was made without gradients",
        "aten.topk.default": "integer results are held",
    }

    def inside(t):
        (grad,) = torch.autograd.grad((t @ t).sin().sum(), t, create_graph=True)
        return grad.tanh()

    (held,) = report(inside, x, policy=recompute_all()).kept_anyway
    assert (held.op, held.held_bytes) == ("aten.mm.default", x.nbytes)
    assert held.why == "a gradient inside the forward recomputed it"
