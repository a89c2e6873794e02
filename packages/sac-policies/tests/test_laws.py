"""Laws of the policy algebra, over random policies and random calls."""

from __future__ import annotations

import pickle

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sac_policies import (
    first_match,
    recompute_all,
    recompute_ops,
    save_all,
    save_by_bytes,
    save_ops,
    scoped,
)
from sac_policies.policies import Decision, OpView, save_by_index

aten = torch.ops.aten
OPS = [aten.mm.default, aten.bmm.default, aten.sin.default, aten.relu_.default]


_leaves = st.sampled_from(
    [
        save_all(),
        recompute_all(),
        save_ops("aten.mm"),
        save_ops("aten.*mm"),
        recompute_ops("aten.mm", "aten.sin"),
        save_by_bytes(at_least=64),
        save_by_index({("aten.mm.default", 1): Decision.SAVE}),
        scoped(save_all(), "attn"),
    ]
)
_policies = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
        st.tuples(inner, inner).map(lambda pair: first_match(*pair)),
        inner.map(lambda policy: ~policy),
    ),
    max_leaves=5,
)
_views = st.builds(
    lambda op, index, out, module: OpView(op, index, out, module=module),
    st.sampled_from(OPS),
    st.integers(0, 2),
    st.sampled_from([torch.ones(2, 2), torch.ones(8, 8), (torch.ones(3), None)]),
    st.sampled_from(["", "attn", "blocks.0.attn.out", "mlp"]),
)
_few = settings(max_examples=60, deadline=None, derandomize=True)


def _saves(policy, view):
    return policy.decide(view) is Decision.SAVE


@_few
@given(_policies, _policies, _views)
def test_de_morgan(left, right, view):
    """~(a | b) = ~a & ~b, and ~(a & b) = ~a | ~b."""
    assert (~(left | right)).decide(view) is (~left & ~right).decide(view)
    assert (~(left & right)).decide(view) is (~left | ~right).decide(view)


@_few
@given(_policies, _views)
def test_double_complement_saves_the_same(policy, view):
    """~~a keeps what a keeps."""
    assert _saves(~~policy, view) is _saves(policy, view)


@_few
@given(_policies, _policies, _policies, _views)
def test_union_and_intersection_are_a_distributive_lattice(a, b, c, view):
    """Commutative, associative, idempotent, absorbing, distributive."""
    for left, right in [
        (a | b, b | a),
        (a & b, b & a),
        ((a | b) | c, a | (b | c)),
        ((a & b) & c, a & (b & c)),
        (a | a, a),
        (a & a, a),
        (a | (a & b), a),
        (a & (a | b), a),
        (a & (b | c), (a & b) | (a & c)),
        (a | (b & c), (a | b) & (a | c)),
    ]:
        assert left.decide(view) is right.decide(view)


@_few
@given(_policies, _policies, _policies, _views)
def test_first_match_is_associative(a, b, c, view):
    """Grouping of rules does not matter, their order does."""
    flat = first_match(a, b, c).decide(view)
    assert first_match(first_match(a, b), c).decide(view) is flat
    assert first_match(a, first_match(b, c)).decide(view) is flat


@_few
@given(_policies, _views)
def test_constant_is_a_promise(policy, view):
    """Where `constant` has an answer, `decide` returns it."""
    constant = policy.constant(view.op)
    if constant is None or isinstance(constant, Decision):
        assert policy.decide(view) is constant


@_few
@given(_policies)
def test_policies_are_values(policy):
    """Pickle gives an equal policy with an equal hash, which compiled code tells apart."""
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy
    assert hash(again) == hash(policy)
    assert again.handle != policy.handle
