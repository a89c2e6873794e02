"""Compiled and sharded in either order: the same losses, no recompilation, no graph break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ._claims import all_are_listed, holds_on_every_rank

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CLAIMS = (
    "a_model_without_a_loop_breaks_where_a_unit_begins",
    "blocks_of_a_kind_share_one_graph",
    "compiling_a_sharded_module",
    "compiling_sharded_blocks_in_place",
    "sharding_blocks_compiled_in_place",
    "sharding_compiled_blocks",
)


@pytest.fixture
def results(ranks: Callable[..., list[Any]]) -> list[dict[str, str]]:
    """All checks of workers/compiled.py, run once on two ranks."""
    return ranks(2, "compiled", timeout_s=300)


test_claim_holds_on_every_rank = holds_on_every_rank(CLAIMS)
test_every_check_is_listed = all_are_listed(CLAIMS)
