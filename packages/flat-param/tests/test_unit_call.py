"""A module that is called past its unit, on four ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CLAIMS = (
    "errors_of_whole_modules_are_their_own",
    "module_called_past_its_unit_is_named",
)


@pytest.mark.parametrize("claim", CLAIMS)
def test_claim_holds_on_every_rank(ranks: Callable[..., list[Any]], claim: str) -> None:
    """Each `check_<claim>` of workers/four_ranks.py passes on all ranks."""
    for rank, result in enumerate(ranks(4, "four_ranks")):
        assert not result[claim], f"rank {rank}: {result[claim]}"
