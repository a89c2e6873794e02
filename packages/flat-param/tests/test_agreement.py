"""Ranks with different modules or settings all say so, before anything travels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flat_param.comm._agreement import describe, difference
from flat_param.plan import ParamSpec

from ._claims import all_are_listed, holds_on_every_rank

SPECS = [ParamSpec("w", (3, 2), torch.float32), ParamSpec("b", (3,), torch.float32)]

CLAIMS = (
    "agreeing_ranks_are_not_counted",
    "another_dtype_is_named",
    "another_nesting_is_named",
    "another_order_is_named",
    "another_setting_is_named",
    "another_shape_is_named",
    "another_mesh_is_named",
    "another_stride_is_named",
    "frozen_on_one_rank_is_named",
    "missing_parameter_is_named",
    "mistake_of_one_rank_is_an_error_on_all",
    "surplus_parameter_is_named",
)


def test_equal_descriptions_have_no_difference() -> None:
    """The same specs and settings describe themselves alike."""
    first, other = (describe(SPECS, {"boundary": "row"}) for _ in range(2))
    assert difference(first, other, ranks=(0, 1)) == ""


def test_parameters_are_compared_before_settings() -> None:
    """Where both differ, the parameter is named."""
    first = describe(SPECS, {"boundary": "row"})
    other = describe(SPECS[:1], {"boundary": "tensor"})
    expected = "parameter 'b' is (3,) of torch.float32 on rank 0 and missing on rank 2"
    assert difference(first, other, ranks=(0, 2)) == expected


def test_ties_are_described() -> None:
    """A tied parameter needs the same places on every rank."""
    tied = [ParamSpec("w", (3, 2), torch.float32, aliases=("head.w",))]
    reason = difference(describe(SPECS[:1], {}), describe(tied, {}), ranks=(0, 1))
    assert reason.endswith("tied to head.w on rank 1")


@pytest.fixture
def results(ranks: Callable[..., list[Any]]) -> list[dict[str, str]]:
    """All checks of workers/agreement.py, run once on two ranks."""
    return ranks(2, "agreement")


test_claim_holds_on_every_rank = holds_on_every_rank(CLAIMS)
test_every_check_is_listed = all_are_listed(CLAIMS)
