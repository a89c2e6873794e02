"""Units that smaller groups keep from forward to backward, on four ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CLAIMS = (
    "changed_parameters_are_gathered_from_shards",
    "groups_of_one_and_of_all_are_the_two_switches",
    "groups_send_and_keep_their_parts",
    "numbers_that_do_not_divide_are_refused",
)


@pytest.mark.parametrize("claim", CLAIMS)
def test_claim_holds_on_every_rank(ranks: Callable[..., list[Any]], claim: str) -> None:
    """Each `check_<claim>` of workers/four_ranks.py passes on all ranks."""
    for rank, result in enumerate(ranks(4, "four_ranks")):
        assert not result[claim], f"rank {rank}: {result[claim]}"
