"""flat-param's sharding of other libraries' models, on one to three processes."""

from __future__ import annotations

import pytest
from _ranks import LORA, SAVING, SHARDED_LAYERS, SHARDING, Claim, check, claims, worlds

pytestmark = pytest.mark.dist
MINE = SHARDING + SHARDED_LAYERS + SAVING + LORA


@worlds
@claims(SHARDING)
def test_sharded_training_is_ddps(claim: Claim, world: int) -> None:
    """Losses and weights equal DDP's after some steps, bit-identical up to two ranks."""
    check(world, claim, MINE)


@worlds
@claims(SHARDED_LAYERS)
def test_layers_of_ckpt_wrap_under_sharding(claim: Claim, world: int) -> None:
    """Checkpointed, offloaded and selective blocks as units: the bare blocks' losses, weights."""
    check(world, claim, MINE)


@worlds
@claims(SAVING)
def test_saved_in_parts_and_loaded(claim: Claim, world: int) -> None:
    """`save_sharded`, `load_sharded`, and the full state in transformers' own file."""
    check(world, claim, MINE)


@worlds
@claims(LORA)
def test_lora_in_a_sharded_model(claim: Claim, world: int) -> None:
    """Adapters in a frozen sharded model train to DDP's weights; close on three ranks."""
    check(world, claim, MINE)
