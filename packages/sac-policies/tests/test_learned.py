"""What a watched forward teaches: how much of what it saves nothing rebuilds."""

from __future__ import annotations

import pytest
import torch

from sac_policies import recompute_all, save_ops
from sac_policies.engines.recipe._edges import Follower
from sac_policies.engines.recipe._replay_entries import every_rule
from sac_policies.engines.recipe._sources import Edges
from sac_policies.engines.recipe._writes import Habit
from sac_policies.engines.recipe.regions._learned import Learned

LARGE, SMALL = torch.zeros(8192), torch.zeros(16)


def _follower() -> Follower:
    return Follower(Edges(), every_rule, 0, (), None, None)  # type: ignore[arg-type]  # it follows nothing


@pytest.mark.parametrize(
    ("stuck", "rebuilt", "keeps"), [([LARGE], 7, False), ([LARGE], 6, True), ([SMALL], 0, False)]
)
def test_much_without_a_recipe_is_a_habit(
    stuck: list[torch.Tensor], rebuilt: int, keeps: bool
) -> None:
    """From an eighth of all bytes on, where that is no small number."""
    learned = Learned()
    for tensor in stuck * 2:
        learned.stuck(tensor)  # saved twice, it is there once
    for number in range(rebuilt):
        learned.rebuilt(LARGE, number)
    found = learned.habit(recompute_all(), _follower())
    assert found is (Habit.KEEPS if keeps else Habit.NONE)
    assert learned.habit(save_ops("aten.mm"), _follower()) is Habit.NONE
