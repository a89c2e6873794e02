"""All ranks load a checkpoint, or none does; a reader sees one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CLAIMS = (
    "extra_state_comes_back",
    "failing_optimizer_takes_the_model_back",
    "reader_during_saves_sees_one_of_them",
    "refusal_on_one_rank_is_one_on_all",
    "training_goes_on_as_if_nothing_had_been",
)


@pytest.fixture(scope="module")
def results(
    ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """All checks of workers/loads.py, run once: two ranks share a model, a third has its own."""
    return ranks(3, "loads", str(tmp_path_factory.mktemp("loads")), timeout_s=300)


@pytest.mark.parametrize("claim", CLAIMS)
def test_claim_holds_on_every_rank(results: list[dict[str, str]], claim: str) -> None:
    """Each `check_<claim>` of workers/loads.py passes on all ranks."""
    for rank, result in enumerate(results):
        assert not result[claim], f"rank {rank}: {result[claim]}"


def test_every_check_is_listed(results: list[dict[str, str]]) -> None:
    """No check of the worker is forgotten here."""
    assert sorted(results[0]) == sorted(CLAIMS)
