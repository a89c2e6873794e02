"""Damaged, foreign and hostile checkpoints: one error type, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CLAIMS = (
    "checksum_tells_every_change_of_place",
    "claimed_sizes_are_checked_first",
    "data_of_another_checkpoint_is_refused",
    "every_flipped_bit_is_refused",
    "many_rectangles_take_linear_time",
    "mutated_metadata_is_refused_cleanly",
    "pickles_cannot_change_classes",
    "plain_files_are_all_or_nothing",
    "rectangles_that_overlap_are_refused",
    "resharding_writes_checksums",
    "wrong_types_are_refused_cleanly",
)


@pytest.fixture(scope="module")
def results(
    ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """All checks of workers/damage.py, run once on one rank."""
    (found,) = ranks(1, "damage", str(tmp_path_factory.mktemp("damage")), timeout_s=400)
    return found


@pytest.mark.parametrize("claim", CLAIMS)
def test_claim_holds(results: dict[str, str], claim: str) -> None:
    """Each `check_<claim>` of workers/damage.py passes."""
    assert not results[claim], results[claim]


def test_every_check_is_listed(results: dict[str, str]) -> None:
    """No check of the worker is forgotten here."""
    assert sorted(results) == sorted(CLAIMS)
