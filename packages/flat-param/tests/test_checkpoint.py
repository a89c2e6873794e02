"""A checkpoint in many parts is there as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_rank_killed_before_its_part_is_complete_leaves_the_earlier_checkpoint(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """A SIGKILL: what was there before still loads, all of it; the next save clears the rest."""
    path = tmp_path / "checkpoint"
    ranks(2, "killed_save", str(path), 1, "data written", killed=(1,))
    assert ranks(1, "read_back", str(path), "after the kill") == [[1.0]]
    assert list(path.glob("draft-*"))
    ranks(2, "killed_save", str(path), -1, "never")
    assert ranks(1, "read_back", str(path), "after the next save") == [[2.0]]
    assert not list(path.glob("draft-*"))
    assert len(list(path.glob("*-rank-*"))) == 2


def test_rank_killed_before_the_rename_leaves_the_earlier_checkpoint(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """A SIGKILL with all data on disk, but under the draft's name."""
    path = str(tmp_path / "checkpoint")
    ranks(2, "killed_save", path, 1, "part complete", killed=(1,))
    assert ranks(1, "read_back", path, "") == [[1.0]]


def test_rank_killed_after_its_part_leaves_one_whole_checkpoint(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """A SIGKILL just before the switch: the earlier or the later checkpoint, never a mixture."""
    path = str(tmp_path / "checkpoint")
    ranks(2, "killed_save", path, 1, "switch", killed=(1,))
    assert ranks(1, "read_back", path, "") in ([[1.0]], [[2.0]])
