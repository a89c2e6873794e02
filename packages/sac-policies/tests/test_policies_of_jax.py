"""Rows of the manual's table of jax.checkpoint_policies save the same values as JAX."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import sac_policies as sp

PAGE = Path(__file__).parents[3] / "docs" / "sac-policies" / "manual.md"
DOT, BATCHED, SIN = "aten.mm.default", "aten.bmm.default", "aten.sin.default"
P, Q = sp.save_ops(sp.MATMULS_2D), sp.save_named("b")
SAVED = {
    "everything_saveable": ({DOT, BATCHED, SIN}, {"a", "b"}),
    "nothing_saveable": (set(), set()),
    "dots_saveable": ({DOT, BATCHED}, set()),
    "checkpoint_dots": ({DOT, BATCHED}, set()),
    "dots_with_no_batch_dims_saveable": ({DOT}, set()),
    "checkpoint_dots_with_no_batch_dims": ({DOT}, set()),
    "offload_dot_with_no_batch_dims": ({DOT}, set()),
    "save_anything_except_these_names": ({DOT, BATCHED, SIN}, {"b"}),
    "save_any_names_but_these": (set(), {"b"}),
    "save_only_these_names": (set(), {"a"}),
    "save_and_offload_only_these_names": (set(), {"a", "b"}),
    "save_from_both_policies": ({DOT}, {"b"}),
}


def _table():
    """The expressions of the page, by the name of JAX's policy."""
    rows = re.findall(r"^\| (`[a-z_]+.*`) \| `(.+)` \|$", PAGE.read_text(), re.MULTILINE)
    return {
        member: here.replace(r"\|", "|")
        for theirs, here in rows
        for member in re.findall(r"`([a-z_]+)", theirs)
    }


def _function(x):
    """One matmul, one batched matmul, one pointwise operator, two names; x is (4, 4)."""
    h = sp.checkpoint_name(x @ x, "a")
    h = torch.bmm(h[None], h[None])[0]
    return sp.checkpoint_name(h.sin(), "b")


def _kept(policy):
    """Kept operators and names of the function, with the decision for each name."""
    x = torch.ones(4, 4, requires_grad=True)
    rows = sp.report(_function, x, policy=policy).kept
    operators = {row.op for row in rows if row.op in (DOT, BATCHED, SIN)}
    return operators, {row.label: row.decision for row in rows if row.label}


def test_every_member_of_jax_0_6_has_its_row():
    """The table has all of JAX's policies and no others."""
    assert _table().keys() == SAVED.keys()


@pytest.mark.parametrize("member", SAVED)
def test_saved_set_is_jaxs(member):
    """Exactly the operators and names that JAX's policy saves."""
    policy = eval(_table()[member], {"sp": sp, "p": P, "q": Q})
    operators, names = _kept(policy)
    assert (operators, names.keys()) == SAVED[member]


def test_offloaded_names_are_offloaded():
    """Names of the second list are offloaded to the host."""
    policy = eval(_table()["save_and_offload_only_these_names"], {"sp": sp})
    assert _kept(policy)[1] == {"a": sp.policies.Decision.SAVE, "b": sp.policies.Decision.OFFLOAD}
