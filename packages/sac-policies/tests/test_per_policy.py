"""What is remembered of a policy: shared by equal ones, and without keeping functions alive."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from sac_policies import Policy, checkpoint, save_modules, save_ops, scoped
from sac_policies.policies import Decision, OpView, as_policy, save_by_index
from sac_policies.policies._per_policy import PerPolicy

pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")


class Model(nn.Module):
    """A region whose policy is a method of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def keep(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Keep nothing."""
        return CheckpointPolicy.PREFER_RECOMPUTE

    def forward(self, x: Tensor) -> Tensor:
        """Run the region."""
        return checkpoint(self.inner, x, policy=self.keep)


@dataclass(frozen=True)
class OfModel(Policy):
    """A policy with a field that is a model."""

    model: nn.Module

    def decide(self, view: OpView) -> None:
        """Decide nothing."""


@dataclass
class Keep:
    """A policy function that cannot be hashed."""

    ops: set[Any] = field(default_factory=lambda: {torch.ops.aten.mm.default})

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        """Keep the listed operators."""
        return op in self.ops


def with_closure(model: nn.Module) -> Any:
    """A policy function that refers to a model."""
    return lambda ctx, op, *args, **kwargs: model is None


@pytest.mark.parametrize("kind", ["method", "closure", "field", "combined"])
def test_deleted_model_is_not_kept_alive(kind):
    """By the policy of its own regions."""
    model = Model()
    policies = {
        "closure": with_closure,
        "field": OfModel,
        "combined": lambda model: save_ops("aten.mm") | as_policy(model.keep),
    }
    make = policies.get(kind)
    alive = weakref.ref(model)
    for _ in range(2):
        x = torch.ones(2, 4, requires_grad=True)
        out = model(x) if make is None else checkpoint(model.inner, x, policy=make(model))
        out.sum().backward()
    del model, out
    gc.collect()
    assert alive() is None


def test_policy_that_cannot_be_hashed_decides():
    """As in torch's checkpoint; also inside another policy."""
    x = torch.randn(3, 3, requires_grad=True)
    (expected,) = torch.autograd.grad((x @ x).sin().sum(), x)
    for policy in (Keep(), as_policy(Keep()) & save_ops("aten.*")):
        out = checkpoint(lambda a: (a @ a).sin(), x, policy=policy)
        (found,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(found, expected)


def test_equal_policies_share_one_object():
    """Also new ones in each step; other ones do not."""
    made = PerPolicy(lambda policy: [policy.offloads])
    model = Model()
    makers = [
        lambda: save_ops("aten.mm"),
        lambda: save_ops("aten.mm", "aten.sin"),
        lambda: scoped(save_ops("aten.mm"), "inner"),
        lambda: ~save_modules("inner"),
        lambda: as_policy(model.keep),
        lambda: as_policy(Keep()),
        lambda: as_policy(Keep(set())),
        lambda: save_by_index({("aten.mm.default", 1): Decision.SAVE}),
    ]
    found = [made.of(make()) for make in makers]
    assert all(made.of(make()) is each for make, each in zip(makers, found, strict=True))
    assert len({id(each) for each in found}) == len(makers)
