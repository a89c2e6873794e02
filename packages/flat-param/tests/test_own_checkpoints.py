"""`save_sharded`, `load_sharded` and whole state dicts on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ._claims import all_are_listed, holds_on_every_rank

CLAIMS = (
    "async_save_is_of_its_call",
    "bad_full_state_changes_nothing",
    "damage_is_an_error_and_changes_nothing",
    "error_of_an_async_save",
    "error_of_one_rank_is_one_of_all",
    "files_of_whole_tensors",
    "full_state",
    "full_state_of_a_plain_model",
    "hostile_files_run_nothing",
    "offloaded_steps_count_once",
    "other_models_are_refused",
    "ranks_at_different_steps_are_refused",
    "saved_and_loaded",
    "torch_loads_it",
)


@pytest.fixture(scope="module")
def results(
    ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """All checks of workers/own_checkpoints.py, run once on two ranks."""
    return ranks(2, "own_checkpoints", str(tmp_path_factory.mktemp("own")), timeout_s=120)


test_claim_holds_on_every_rank = holds_on_every_rank(CLAIMS)
test_every_check_is_listed = all_are_listed(CLAIMS)
