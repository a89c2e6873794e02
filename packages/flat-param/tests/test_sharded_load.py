"""All ranks load a checkpoint, or none does; a reader sees one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ._claims import all_are_listed, holds_on_every_rank

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CLAIMS = (
    "extra_state_comes_back",
    "failing_optimizer_takes_the_model_back",
    "groups_are_matched_by_name",
    "reader_during_saves_sees_one_of_them",
    "refusal_on_one_rank_is_one_on_all",
    "state_of_another_rank_is_refused",
    "training_goes_on_as_if_nothing_had_been",
)


@pytest.fixture(scope="module")
def results(
    ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """All checks of workers/loads.py, run once: two ranks share a model, a third has its own."""
    return ranks(3, "loads", str(tmp_path_factory.mktemp("loads")), timeout_s=300)


test_claim_holds_on_every_rank = holds_on_every_rank(CLAIMS)
test_every_check_is_listed = all_are_listed(CLAIMS)
