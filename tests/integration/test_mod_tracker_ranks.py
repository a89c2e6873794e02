"""mod-tracker in every process of a parallel run."""

from __future__ import annotations

import pytest
from _ranks import TRACKED, Claim, check, claims, worlds

pytestmark = pytest.mark.dist


@worlds
@claims(TRACKED)
def test_flops_on_every_rank(claim: Claim, world: int) -> None:
    """Counting under DDP and both kinds of sharding: the same weights, equal totals."""
    check(world, claim, TRACKED)
