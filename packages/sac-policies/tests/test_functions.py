"""Texts, lists and dicts are accepted as policies and equal the corresponding rules."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from sac_policies import (
    MATMULS,
    PolicyError,
    first_match,
    offload,
    recompute_all,
    recompute_ops,
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
