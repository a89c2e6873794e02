"""Checkpoints of sharded modules: saved silently, loaded anywhere, refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flat_param
from flat_param.checkpoint import _sharded_save, _writer

from ._claims import all_are_listed, holds_on_every_rank

WIDTH = 512
SLACK_BYTES = 2 << 20  # of it, 1 MiB is a block of checksums
CLAIMS = (
    "adafactor_state_is_kept",
    "damaged_files_are_refused_by_name",
    "fsdp1_full_checkpoints_load",
    "fsdp2_checkpoints_load",
    "full_state_equals_the_plain_one",
    "hostile_files_are_errors_not_executions",
    "mismatched_checkpoints_are_refused_by_name",
    "offline_resharding_changes_nothing",
    "sharded_save_makes_no_collective",
    "sharded_state_comes_back",
    "state_of_another_shape_is_refused_by_name",
    "torch_loads_our_checkpoint",
)


@pytest.fixture(scope="module")
def results(
    ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """All checks of workers/checkpoints.py, run once on two ranks."""
    return ranks(2, "checkpoints", str(tmp_path_factory.mktemp("checkpoints")), timeout_s=120)


test_claim_holds_on_every_rank = holds_on_every_rank(CLAIMS)
test_every_check_is_listed = all_are_listed(CLAIMS)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Dismissing:
    """A meeting whose other ranks are a step ahead."""

    def __init__(self) -> None:
        self.left = 0

    def join(self, note: dict[str, Any], **_: Any) -> str:
        """No attempt."""
        return ""

    def leave(self) -> None:
        """Counted."""
        self.left += 1


@pytest.mark.usefixtures("group_of_one")
def test_call_that_was_alone_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """False: the path holds what it held; one that was not alone says that it holds this state."""
    model, meeting = flat_param.fully_shard(nn.Linear(2, 2)), Dismissing()
    with monkeypatch.context() as patch:
        patch.setattr(_sharded_save, "meeting_of", lambda *_: meeting)
        assert flat_param.save_sharded(model, tmp_path / "path") is False
    assert meeting.left == 1
    assert not (tmp_path / "path").exists()
    assert flat_param.save_sharded(model, tmp_path / "path") is True
    assert (tmp_path / "path").exists()


@pytest.mark.usefixtures("group_of_one")
def test_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That one ends once it is waited for, and no sooner."""
    waited_for = threading.Event()
    monkeypatch.setattr(_writer, "_last", None)
    monkeypatch.setattr(
        _sharded_save, "wait_for_last", lambda: (waited_for.set(), _writer.wait_for_last())
    )
    before = _writer.start(lambda: waited_for.wait(30), "before")
    try:
        flat_param.save_sharded(flat_param.fully_shard(nn.Linear(2, 2)), tmp_path / "path")
        assert before.done()
    finally:
        waited_for.set()
        before.result()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process's peak")
@pytest.mark.parametrize(("what", "parts"), [("save", 0), ("async", 1), ("load", 1)])
def test_peak_is_one_part_and_the_largest_tensor(what: str, parts: int) -> None:
    """Measured by the system; a save that is waited for does without the part."""
    script = Path(__file__).parent / "workers" / "checkpoint_peak.py"
    found = subprocess.run(
        [sys.executable, str(script), what, str(WIDTH)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not found.returncode, found.stderr
    # Before its own line, older Gloo says in stdout whom it is connected to.
    part, largest, peak = json.loads(found.stdout.splitlines()[-1])
    slack = SLACK_BYTES + 2 * largest * torch.__version__.startswith("2.9.")  # more copies
    # What is measured has seen the part; less of it where memory freed before is used again.
    assert parts * part <= 2 * peak
    assert peak <= parts * part + largest + slack
