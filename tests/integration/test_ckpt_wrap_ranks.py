"""ckpt-wrap under data parallelism and sharding, on one to three processes."""

from __future__ import annotations

import pytest
from _ranks import ACCELERATE, LAYERS, LIGHTNING, Claim, check, claims, worlds

pytestmark = pytest.mark.dist
MINE = LAYERS + ACCELERATE + LIGHTNING


@worlds
@claims(LAYERS)
def test_layers_under_ddp_and_fsdp2(claim: Claim, world: int) -> None:
    """Every kind of wrapper gives the bare blocks' losses and weights."""
    check(world, claim, MINE)


@worlds
@claims(ACCELERATE)
def test_accelerate_prepares_checkpointed_blocks(claim: Claim, world: int) -> None:
    """`prepare` puts DDP over them, with clipping; weights equal the bare blocks'."""
    check(world, claim, MINE)


@worlds
@claims(LIGHTNING)
def test_lightning_trains_checkpointed_blocks(claim: Claim, world: int) -> None:
    """`strategy="ddp"` as under torchrun; weights equal the bare blocks'."""
    check(world, claim, MINE)
