"""Training with parameters that are sent in low precision, on ranks of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.dist]


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_is_that_of_rounding_by_hand(ranks: Callable[..., list[Any]], world: int) -> None:
    """Each check of workers/scaled.py passes on every rank."""
    results = ranks(world, "scaled", timeout_s=240)
    assert [len(result) for result in results] == [14] * world, "a check has come or gone"
    for rank, result in enumerate(results):
        failed = [f"rank {rank}: {claim}\n{error}" for claim, error in result.items() if error]
        assert not failed, "\n".join(failed)


@pytest.mark.slow
def test_a_transformer_learns_as_in_bfloat16(ranks: Callable[..., list[Any]]) -> None:
    """The last losses are within 2 % of bfloat16's, for a quarter of float32's bytes.

    What is sent are values and scales of all, or of matrices beside 2 bytes for the others; and
    less than a thousandth more where parameters end inside of a block.
    """
    found, _ = ranks(2, "scaled_training", timeout_s=240)
    last = {name: sum(way["losses"][-20:]) / 20 for name, way in found.items()}
    sent = {name: way["sent"] / found["float32"]["sent"] for name, way in found.items()}
    calls = {name: way["calls"] for name, way in found.items()}
    for name, loss in last.items():
        assert loss < 0.6 * found[name]["losses"][0], name
        assert abs(loss / last["bfloat16"] - 1) < 0.02, (name, last)
        assert calls[name] == (10 if "blocks" in name else 5), name
    assert 33 / 128 <= sent["e4m3, all parameters"] < 1.001 * 33 / 128
    assert all(each < 0.27 for name, each in sent.items() if name.startswith("e"))
    assert len(last) == 6
