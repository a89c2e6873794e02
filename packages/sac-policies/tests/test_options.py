"""Options of torch's checkpoint, combined with a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sac_policies import EngineError, MutationError, RecomputeError, checkpoint, recompute_all

UNCHECKED = {"determinism_check": "none"}


class Body(nn.Module):
    """Three functions of one tensor; each test makes it a region."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin().cos().exp()


def leaf() -> Tensor:
    """A leaf of evenly spaced values."""
    return torch.linspace(-1.3, 1.7, 128 * 64).reshape(128, 64).requires_grad_()


def changed(run: Callable[[Tensor], Tensor]) -> Tensor | None:
    """The gradient after a change that no version counter shows, before backward."""
    x = leaf()
    out = run(x)
    x.data.add_(1.0)
    out.sum().backward()
    return x.grad


def test_first_step_of_a_region_notices_changes_past_version_counters() -> None:
    """Later steps compare bits only with `determinism_check="bits"`."""
    body = Body()

    def run(x: Tensor, **options: Any) -> Tensor:
        return checkpoint(body, x, policy=recompute_all(), **options)

    with pytest.raises(RecomputeError, match="other bits in backward"):
        changed(run)
    assert changed(run) is not None
    for _ in range(2):
        with pytest.raises(RecomputeError, match="other bits in backward"):
            changed(lambda x: run(x, determinism_check="bits"))


def test_changes_that_a_version_counter_shows_are_noticed_all_the_same() -> None:
    """As autograd's own check does."""
    given = leaf() * 1.0
    out = checkpoint(Body(), given, policy=recompute_all(), **UNCHECKED)
    with torch.no_grad():
        given.add_(1.0)
    with pytest.raises(MutationError):
        out.sum().backward()


@pytest.mark.parametrize("check", ["default", "bits", "none"])
@pytest.mark.parametrize("inner", ["default", "bits", "none"])
def test_gradients_are_plain_under_every_check(check: str, inner: str) -> None:
    """A nested region, in which each region has another option."""

    def around(x: Tensor) -> Tensor:
        policy = recompute_all()
        return checkpoint(Body(), x.exp(), policy=policy, determinism_check=inner).cos()

    x, y = leaf(), leaf()
    checkpoint(around, x, policy=recompute_all(), determinism_check=check).sum().backward()
    Body()(y.exp()).cos().sum().backward()
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("check", ["banana", None, True, torch.ones(2)], ids=str)
def test_unknown_check_is_refused(check: Any) -> None:
    """Before anything runs; the error lists the accepted values."""
    accepted = r"determinism_check .+ one of \('default', 'bits', 'none'\)"
    with pytest.raises(EngineError, match=accepted):
        checkpoint(Body(), leaf(), policy=recompute_all(), determinism_check=check)
