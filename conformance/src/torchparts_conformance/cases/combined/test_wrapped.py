"""Drop-in names together: wrappers, policies and the tracker."""

from __future__ import annotations

import functools

from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.combined._training import (
    BLOCKS,
    PRODUCTS,
    assert_same,
    make_model,
    train,
)

INFIX = "_checkpoint_wrapped_module."


def _wrapped(parts, device, dropout=0.0, policy=PRODUCTS):
    model = make_model(device, dropout)
    wrap = functools.partial(
        parts.ckpt_wrap.checkpoint_wrapper, context_fn=parts.sac_policies.context_fn(policy)
    )
    return nn.Sequential(*(wrap(block) for block in model[:BLOCKS]), model[BLOCKS])


def _clean(name):
    return name.replace(INFIX, "")


@requirement(
    "CB-001",
    "A model in checkpoint wrappers with a selective policy MUST train bit-identically to the "
    "plain model.",
    rationale="checkpointing may change when values are computed, but never the values",
)
def test_wrapper_with_a_policy_trains_as_plain(parts, device):
    """Three steps with dropout give the same losses, gradients and parameters."""
    plain = train(make_model(device, 0.5), device)
    assert_same(train(_wrapped(parts, device, 0.5), device), plain, _clean)


@requirement(
    "CB-002",
    "Tracking a model in checkpoint wrappers with a selective policy MUST leave its training "
    "bit-identical.",
    rationale="a tracker only observes",
)
def test_tracking_changes_nothing(parts, device):
    """A tracker around each step changes no losses, gradients or parameters."""
    plain = train(make_model(device, 0.5), device)
    tracker = parts.mod_tracker.ModTracker()
    tracked = train(_wrapped(parts, device, 0.5), device, around=lambda: tracker)
    assert_same(tracked, plain, _clean)
