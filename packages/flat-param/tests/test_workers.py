"""Each `check_<claim>` of a script in workers/ holds on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

WORKERS = Path(__file__).parent / "workers"
CLAIMS = {
    path.stem: re.findall(r"^def check_(\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    for path in sorted(WORKERS.glob("*.py"))
}
NIGHTLY = {
    "offloaded": [(2,)],
    "beside_units": [(4, 2)],
    "parallel_checkpoints": [(4, 1), (4, 2)],
}
RUNS: dict[str, list[tuple[int, ...]]] = {
    **{script: [(2,)] for script, claims in CLAIMS.items() if claims},
    "four_ranks": [(4,)],
    "tensor_parallel": [(4,)],
    # And the number of rows of ranks.
    "beside_units": [(2, 1), (2, 2), (4, 2)],
    "parallel_checkpoints": [(4, 2), (4, 1)],
}
"""The number of ranks of each run of a script, and its arguments."""
del RUNS["dcp_resume"]  # reads what dcp_states has saved, see below


@pytest.mark.parametrize(
    ("script", "run", "claim"),
    [
        pytest.param(
            script,
            run,
            claim,
            id="-".join([script, *map(str, run), claim]),
            marks=pytest.mark.nightly if run in NIGHTLY.get(script, ()) else (),
        )
        for script, runs in RUNS.items()
        for run in runs
        for claim in CLAIMS[script]
    ],
)
def test_claim_holds_on_every_rank(
    ranks: Callable[..., list[Any]], script: str, run: tuple[int, ...], claim: str
) -> None:
    """A script is run once with all its checks."""
    world, *arguments = run
    for rank, result in enumerate(ranks(world, script, *arguments, timeout_s=400)):
        if result[claim].startswith("skipped: "):
            pytest.skip(result[claim])
        assert not result[claim], f"rank {rank}: {result[claim]}"


@pytest.mark.parametrize("world", [1, 3, pytest.param(4, marks=pytest.mark.nightly)])
def test_checkpoint_loads_on_other_number_of_ranks(ranks: Any, world: int) -> None:
    """All checks of workers/dcp_resume.py."""
    ranks(2, "dcp_states", timeout_s=400)
    folder = str(ranks.folder(2, "dcp_states", timeout_s=400))
    for found in ranks(world, "dcp_resume", folder, timeout_s=400):
        assert not any(found.values()), "\n".join(found.values())


def test_state_of_blocks_is_one_processes_on_any_ranks(ranks: Any, tmp_path: Path) -> None:
    """Trained and saved on two, taken up on one and on three: every bit, then and later."""
    assert ranks(2, "block_state", str(tmp_path), "save", timeout_s=400) == ["save"] * 2
    for world in (1, 3):
        found = ranks(world, "block_state", str(tmp_path), "resume", timeout_s=400)
        assert found == ["resume"] * world
