"""A checkpoint in many parts is there as a whole or not at all."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ._claims import all_are_listed, holds_on_every_rank

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CLAIMS = (
    "another_path_or_model_is_refused",
    "copies_take_part",
    "error_before_writing_is_an_error_on_all",
    "full_disk_on_one_rank_is_named_on_all",
    "hundreds_of_saves_to_one_path",
    "lone_call_ends_and_spoils_nothing",
    "lone_call_is_not_joined_by_a_later_step",
    "lone_call_is_not_joined_where_nothing_is_cut",
    "lone_call_of_the_other_rank_is_not_joined",
    "named_steps_are_compared",
    "part_of_another_attempt_is_not_taken",
    "ranks_meet_without_a_store",
)
NEVER = -1
VICTIMS = (0, 1)
SHARES = (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)


@pytest.fixture(scope="module")
def results(
    ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """All checks of workers/save_protocol.py, run once on two ranks."""
    return ranks(2, "save_protocol", str(tmp_path_factory.mktemp("saves")), timeout_s=300)


test_claim_holds_on_every_rank = holds_on_every_rank(CLAIMS)
test_every_check_is_listed = all_are_listed(CLAIMS)


@pytest.fixture(scope="module")
def calls(
    ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, ...]:
    """How often each rank calls the file system in a save that nothing disturbs."""
    path = str(tmp_path_factory.mktemp("undisturbed"))
    found = ranks(2, "killed_save", path, 0, NEVER)
    assert not any(each["error"] for each in found)
    return tuple(each["calls"] for each in found)


@pytest.fixture(scope="module")
def kills(
    ranks: Any, run: Callable[..., Any], calls: tuple[int, ...], tmp_path_factory: Any
) -> dict[tuple[int, float], tuple[Path, Any]]:
    """All saves in which a rank is killed, since the other one then waits for seconds."""
    found = {}
    for victim, share in itertools.product(VICTIMS, SHARES):
        path, point = tmp_path_factory.mktemp("killed") / "checkpoint", int(calls[victim] * share)
        killed = run(2, "killed_save", (str(path), victim, point), killed=(victim,))
        found[victim, share] = path, killed
    ranks.ahead([killed for _, killed in found.values()])
    return found


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("victim", VICTIMS)
def test_rank_killed_anywhere_leaves_one_whole_checkpoint(
    ranks: Any, kills: dict[tuple[int, float], tuple[Path, Any]], victim: int, share: float
) -> None:
    """A SIGKILL at a counted call to the file system: all ones or all twos, and no more than that.

    The other rank is told, unless the checkpoint was already there. The next save, by all, is
    right, and leaves nothing of this one.
    """
    path, killed = kills[victim, share]
    outcome = ranks.results_of(killed)[1 - victim]
    (found,) = ranks(1, "read_back", str(path), "after the kill")
    assert found in ([1.0], [2.0])
    assert outcome["error"] or found == [2.0]
    ranks(2, "killed_save", str(path), 0, NEVER)
    assert ranks(1, "read_back", str(path), "after the next save") == [[2.0]]
    assert len(os.listdir(path)) == 3
