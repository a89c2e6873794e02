"""Every member of jax.checkpoint_policies saves the set of values that JAX's does."""

from __future__ import annotations

import pytest
import torch

from sac_policies import ConflictError, Decision, jax_policies, name, report

DOT, BATCHED, SIN = "aten.mm.default", "aten.bmm.default", "aten.sin.default"


def _function(x):
    """One product, one batched product, one pointwise operator, two names; x is (4, 4)."""
    h = name(x @ x, "a")
    h = torch.bmm(h[None], h[None])[0]
    return name(h.sin(), "b")


def _kept(policy):
    """Operators kept, and names kept, in a function of the four kinds of values."""
    x = torch.ones(4, 4, requires_grad=True)
    rows = report(_function, x, policy=policy).kept
    operators = {row.op for row in rows if row.op in (DOT, BATCHED, SIN)}
    return operators, {row.label for row in rows if row.label}


jp = jax_policies


@pytest.mark.parametrize(
    ("policy", "operators", "names"),
    [
        (jp.everything_saveable(), {DOT, BATCHED, SIN}, {"a", "b"}),
        (jp.nothing_saveable(), set(), set()),
        (jp.dots_saveable(), {DOT, BATCHED}, set()),
        (jp.checkpoint_dots(), {DOT, BATCHED}, set()),
        (jp.dots_with_no_batch_dims_saveable(), {DOT}, set()),
        (jp.checkpoint_dots_with_no_batch_dims(), {DOT}, set()),
        (jp.offload_dot_with_no_batch_dims("device", "pinned_host"), {DOT}, set()),
        (jp.save_anything_except_these_names("a"), {DOT, BATCHED, SIN}, {"b"}),
        (jp.save_any_names_but_these("a"), set(), {"b"}),
        (jp.save_any_names_but_these(), set(), {"a", "b"}),
        (jp.save_only_these_names("a"), set(), {"a"}),
        (jp.save_only_these_names(), set(), set()),
        (
            jp.save_and_offload_only_these_names(
                names_which_can_be_saved=["a"],
                names_which_can_be_offloaded=["b"],
                offload_src="device",
                offload_dst="pinned_host",
            ),
            set(),
            {"a", "b"},
        ),
        (
            jp.save_from_both_policies(
                jp.dots_with_no_batch_dims_saveable(), jp.save_only_these_names("b")
            ),
            {DOT},
            {"b"},
        ),
    ],
)
def test_saved_set_is_jaxs(policy, operators, names):
    """The operators and names that JAX's member keeps, no more and no fewer."""
    assert _kept(policy) == (operators, names)


def test_every_member_has_an_equivalent():
    """The names of jax.checkpoint_policies, as of JAX 0.6, are all here."""
    members = {
        "checkpoint_dots",
        "checkpoint_dots_with_no_batch_dims",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
        "everything_saveable",
        "nothing_saveable",
        "offload_dot_with_no_batch_dims",
        "save_and_offload_only_these_names",
        "save_any_names_but_these",
        "save_anything_except_these_names",
        "save_from_both_policies",
        "save_only_these_names",
    }
    assert not members - set(vars(jax_policies))


def test_offloaded_names_are_offloaded():
    """Names of the second list go to the host."""
    policy = jp.save_and_offload_only_these_names(
        names_which_can_be_saved=["a"], names_which_can_be_offloaded=["b"]
    )
    x = torch.ones(4, 4, requires_grad=True)
    decisions = {row.label: row.decision for row in report(_function, x, policy=policy).kept}
    assert decisions == {"a": Decision.SAVE, "b": Decision.OFFLOAD}


def test_name_in_both_lists_is_a_conflict():
    """JAX raises here too; the error shows both lists and what they share."""
    with pytest.raises(ConflictError, match=r"names \['b'\] are in both \['a', 'b'\] and \['b'\]"):
        jp.save_and_offload_only_these_names(
            names_which_can_be_saved=["a", "b"], names_which_can_be_offloaded=["b"]
        )
