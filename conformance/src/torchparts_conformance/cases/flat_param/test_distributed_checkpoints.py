"""Checkpoints of sharded modules, on two ranks."""

from __future__ import annotations

from typing import Any

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._sharded import distance, plain, sharded, whole_state


def _state_dict(part: Any, rank: int, world_size: int) -> list[Any]:
    model, reference = sharded(part, 3), plain(3).state_dict()
    kinds = [(name, tensor.shape, tensor.dtype) for name, tensor in reference.items()]
    same = [(name, t.shape, t.dtype) for name, t in model.state_dict().items()] == kinds
    state, loaded = whole_state(model), plain(4)
    loaded.load_state_dict(state)
    return [same, max(distance(state, reference), distance(loaded.state_dict(), reference))]


@requirement(
    "FP-106",
    "state_dict() of a sharded module MUST have the plain module's keys, shapes and dtypes on "
    "every rank, its full tensors MUST equal the plain module's, and the plain module MUST load "
    "them.",
    rationale="pytorch#102667: LOCAL_STATE_DICT does not load again even on two ranks",
    profile="distributed",
)
def test_state_dict_equals_the_plain_one(part, ranks):
    """Keys, shapes, dtypes and values, on both ranks, also after loading."""
    assert ranks(2, _state_dict) == [[True, 0.0], [True, 0.0]]
