"""flat-param's sharding of other libraries' models, on one to three processes."""

from __future__ import annotations

import pytest
from _ranks import LORA, MODELS, SAVING, SHARDED_LAYERS, SHARDING, Claim, check, claims, worlds

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


OUTSIDE = "the model calls a module of a sharded block from outside of the block"


@claims(MODELS)
def test_every_model_trains_as_under_ddp(claim: Claim, request: pytest.FixtureRequest) -> None:
    """Weights are bit-identical after some steps on two ranks."""
    if claim[1] == "DiT":
        request.applymarker(pytest.mark.xfail(strict=True, reason=OUTSIDE))
    check(2, claim, MODELS)
