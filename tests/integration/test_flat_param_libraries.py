"""Sharded models in pipelines, accelerate, Trainer, Lightning and PEFT, on two and four ranks."""

from __future__ import annotations

import pytest
from _ranks import LIBRARIES, Claim, check, claims

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("world", [2, 4])
@claims(LIBRARIES)
def test_libraries_recognise_sharded_models(claim: Claim, world: int) -> None:
    """Each function of `_libraries.py` holds on every rank."""
    check(world, claim, LIBRARIES)
