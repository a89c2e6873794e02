"""Checkpoints of sharded modules: saved silently, loaded anywhere, refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CLAIMS = (
    "adafactor_state_is_kept",
    "damaged_files_are_refused_by_name",
    "fsdp1_full_checkpoints_load",
    "fsdp2_checkpoints_load",
    "full_state_equals_the_plain_one",
    "hostile_files_are_errors_not_executions",
    "mismatched_checkpoints_are_refused_by_name",
    "offline_resharding_changes_nothing",
    "sharded_save_makes_no_collective",
    "sharded_state_comes_back",
    "torch_loads_our_checkpoint",
)


@pytest.fixture(scope="module")
def results(
    ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """All checks of workers/checkpoints.py, run once on two ranks."""
    return ranks(2, "checkpoints", str(tmp_path_factory.mktemp("checkpoints")), timeout_s=120)


@pytest.mark.parametrize("claim", CLAIMS)
def test_claim_holds_on_every_rank(results: list[dict[str, str]], claim: str) -> None:
    """Each `check_<claim>` of workers/checkpoints.py passes on both ranks."""
    for rank, result in enumerate(results):
        assert not result[claim], f"rank {rank}: {result[claim]}"


def test_every_check_is_listed(results: list[dict[str, str]]) -> None:
    """No check of the worker is forgotten here."""
    assert sorted(results[0]) == sorted(CLAIMS)
