"""A tensor of one value is kept as that value, and no other is."""

from __future__ import annotations

import pytest
import torch

from sac_policies import MutationError, profile, report, solve
from sac_policies.engines.recipe._filled import filling_of

from ._recipe import bytes_held, bytes_kept, is_plain, leaf, run

pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")

SIZE = 64 * 32 * 4


def _recurrent(t: torch.Tensor) -> torch.Tensor:
    state = torch.zeros(64, 32)
    for _ in range(2):
        state = state * t + 0.5
    return state


def test_first_state_of_a_recurrence_is_kept_as_a_number() -> None:
    """The product saves it; backward has it again, whole."""
    x = leaf(64, 32)
    assert bytes_held(lambda t: torch.zeros(64, 32) * t, x) == 4
    assert bytes_kept(lambda t: torch.zeros(64, 32) * t, x) < SIZE // 2
    assert is_plain(_recurrent, x)
    plan = solve(profile(_recurrent, x, unit="flops"), "100%")
    assert plan.kept_bytes == report(_recurrent, x, policy=plan).held_bytes < 2 * SIZE


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (0.0, torch.float32),
        (-0.0, torch.float64),
        (float("nan"), torch.float32),
        (1.5, torch.bfloat16),
        (True, torch.bool),
        (-7, torch.int64),
    ],
)
def test_any_value_of_any_width_is_one(value: float, dtype: torch.dtype) -> None:
    """Compared as bits: a number that is not one, too, and the sign of zero."""
    found = filling_of(torch.full((40, 50), value, dtype=dtype))
    assert found is not None
    wanted = torch.full((1,), value, dtype=dtype)
    assert found.view(torch.uint8).tolist() == wanted.view(torch.uint8).tolist()


@pytest.mark.parametrize("at", [0, 1, 999, 1000, 1001, 1998, 1999])
def test_one_other_element_anywhere_is_enough(at: int) -> None:
    """Three are looked at first; the rest is looked at, too."""
    tensor = torch.zeros(2000)
    tensor[at] = -0.0 if at % 2 else 1e-38
    assert filling_of(tensor) is None


def test_what_is_small_or_not_all_there_stays() -> None:
    """Little would be won; elements that a view leaves out are not looked at."""
    assert filling_of(torch.zeros(200)) is None
    assert filling_of(torch.zeros(2000)[:1500]) is None
    assert filling_of(torch.zeros(1).expand(2000)) is None
    assert filling_of(torch.zeros(2000, requires_grad=True)) is None
    assert filling_of(torch.nn.Parameter(torch.zeros(2000), requires_grad=False)) is None


def test_layout_comes_back() -> None:
    """Strides are those of the tensor that was saved."""
    x = leaf(32, 64)
    assert is_plain(lambda t: torch.zeros(64, 32).t() * t + t.sin(), x)


def test_one_that_is_written_to_is_an_error() -> None:
    """As in plain autograd, although its value is known."""
    kept: list[torch.Tensor] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        kept.append(torch.ones(64, 32))
        return kept[-1] * t

    out = run(function, leaf(64, 32))
    kept[-1].add_(1.0)
    with pytest.raises(MutationError, match="changed in place after it was saved"):
        out.sum().backward()
