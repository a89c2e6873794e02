"""What once went wrong without a word is right, or refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ._claims import all_are_listed, holds_on_every_rank

pytest.importorskip("transformers")

CLAIMS = (
    "forward_after_a_failed_export",
    "gradient_penalty",
    "gradients_are_copied",
    "groups_by_number_of_dimensions",
    "loss_of_pieces_is_refused",
    "optimizers_of_whole_tensors_are_found_by_what_they_do",
    "parameter_added_after_a_step_is_refused",
    "parameter_added_after_sharding_is_refused",
    "product_with_a_piece_is_refused",
    "reductions_of_pieces_are_refused",
    "rows_are_reduced_along_rows",
    "saved_pretrained_folder_loads",
    "second_backward_after_a_stopped_one",
    "transformers_keeps_ranks_in_step",
)


@pytest.fixture(scope="module")
def results(ranks: Callable[..., list[Any]]) -> list[dict[str, str]]:
    """All checks of workers/traps.py, run once on two ranks."""
    return ranks(2, "traps", timeout_s=120)


test_claim_holds_on_every_rank = holds_on_every_rank(CLAIMS)
test_every_check_is_listed = all_are_listed(CLAIMS)
