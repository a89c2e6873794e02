"""Texts, lists and dicts are accepted as policies and equal the corresponding rules."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from sac_policies import (
    MATMULS,
    PolicyError,
    checkpoint,
    first_match,
    offload,
    recompute_all,
    recompute_ops,
    report,
    save_ops,
    scoped,
)
from sac_policies.policies import Decision, as_policy


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ("aten.mm", save_ops("aten.mm")),
        ("attn :: aten.mm", scoped(save_ops("aten.mm"), "attn")),
        (["aten.mm", MATMULS], save_ops("aten.mm", MATMULS)),
        (
            ["a.*.b :: aten.mm", MATMULS],
            first_match(scoped(save_ops("aten.mm"), "a.*.b"), save_ops(MATMULS)),
        ),
        ({"aten::mm": True}, first_match(save_ops("aten.mm"))),
        (
            {"x :: aten.mm": "offload", MATMULS: Decision.SAVE, "aten.*": False},
            first_match(
                scoped(offload("aten.mm"), "x"), save_ops(MATMULS), recompute_ops("aten.*")
            ),
        ),
        (
            {torch.ops.aten.mm.default: CheckpointPolicy.MUST_SAVE},
            first_match(save_ops("aten.mm.default")),
        ),
        ({}, recompute_all()),
        ([], recompute_all()),
    ],
)
def test_what_is_given_is_the_policy_that_rules_would_make(given, policy):
    """The result is equal to the rule."""
    assert as_policy(given) == policy


@pytest.mark.parametrize("order", list(itertools.permutations(["aten.mm", "aten.*", "aten.sin"])))
def test_the_first_entry_of_a_dict_that_names_an_operator_decides(order):
    """Entries are tried in the order of the dict, as in `first_match`."""
    words = {"aten.mm": "save", "aten.*": "recompute", "aten.sin": "save"}
    x = torch.ones(2, 2, requires_grad=True)
    seen = report(lambda t: (t @ t).sin().cos(), x, policy={each: words[each] for each in order})
    expected = {
        op: next(words[e] for e in order if e in (op, "aten.*"))
        for op in ("aten.mm", "aten.sin", "aten.cos")
    }
    found = {row.op.removesuffix(".default"): row.decision.value for row in seen.rows}
    assert found == expected


def test_a_dict_works_where_policies_do():
    """Gradients match the plain call, and only the router's matmul is kept."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.expert = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.router(x).softmax(-1) * self.expert(x).tanh()

    model, x = nn.Sequential(Layer(), Layer()), torch.randn(3, 4)
    policy = {"*.router :: aten.addmm": "save", "aten.*": "recompute"}
    kept = report(model, x, policy=policy).kept
    assert [row.module for row in kept] == ["0.router", "1.router"]
    gradients = []
    for run in (model, lambda x: checkpoint(model, x, policy=policy)):
        model.zero_grad()
        run(x).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"aten.mm": "keep"}, "policy decides 'keep' for 'aten.mm', but a decision is one of"),
        ({"aten.mm": 3}, "policy decides 3 for 'aten.mm', but a decision is one of"),
        ({"aten.mn": "save"}, "operator 'aten.mn' is not registered"),
        ({3: "save"}, "entry 3 is a int"),
        (["attn :: aten.mn"], "operator 'aten.mn' is not registered"),
        (" :: aten.mm", "module path"),
        ("attn :: ", "entry"),
        (3, "policy 3 is a int, but a policy, a function, or a list or dict of operators"),
    ],
)
def test_what_cannot_be_read_is_named(given, words):
    """The error names the entry and the accepted values."""
    with pytest.raises(PolicyError) as error:
        as_policy(given)
    assert words in str(error.value)
