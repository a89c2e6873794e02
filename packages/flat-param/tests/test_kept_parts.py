"""Units that smaller groups keep from forward to backward, on four ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ._claims import holds_on_every_rank

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CLAIMS = (
    "changed_parameters_are_gathered_from_shards",
    "groups_of_one_and_of_all_are_the_two_switches",
    "groups_send_and_keep_their_parts",
    "numbers_that_do_not_divide_are_refused",
)


@pytest.fixture
def results(ranks: Callable[..., list[Any]]) -> list[dict[str, str]]:
    """All checks of workers/four_ranks.py, run once on four ranks."""
    return ranks(4, "four_ranks")


test_claim_holds_on_every_rank = holds_on_every_rank(CLAIMS)
