"""Cutting a checkpoint anew takes the memory of one new part and one tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flat_param

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SOURCES = ("wide-1", "wide-4")
WIDTH = 512
WAYS = (8, 4, 3, 2, 1)
TENSOR_BYTES = 4 * WIDTH * WIDTH * 4
TOTAL_BYTES = 3 * (TENSOR_BYTES + 8 * (WIDTH + 1) * WIDTH * 4)  # parameters and two moments
SLACK_BYTES = 1 << 20


@pytest.fixture(scope="module")
def folder(ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of workers/wide_checkpoint.py."""
    path = tmp_path_factory.mktemp("wide")
    ranks(1, "wide_checkpoint", str(path), WIDTH)
    return path


def start(folder: Path, source: str) -> subprocess.Popen[str]:
    """A process that does nothing but cut one of them.

    malloc is told to return every large block, or it would keep some for the next one.
    """
    script = Path(__file__).parent / "workers" / "reshard_peak.py"
    command = [sys.executable, str(script), str(folder / "small"), str(folder / source)]
    return subprocess.Popen(
        [*command, *map(str, WAYS)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def processes(folder: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """For both sources, at the same time."""
    found = {source: start(folder, source) for source in SOURCES}
    yield found
    for process in found.values():
        with process:
            process.kill()  # that of a test that was not run


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process's peak")
@pytest.mark.parametrize("source", SOURCES)
def test_peak_is_one_new_part_and_the_largest_tensor(
    processes: dict[str, subprocess.Popen[str]], source: str
) -> None:
    """Measured by the system."""
    with processes[source] as process:
        stdout, stderr = process.communicate(timeout=240)
    assert not process.returncode, stderr
    slack = SLACK_BYTES + 2 * TENSOR_BYTES * torch.__version__.startswith("2.9.")  # more copies
    for ways, peak_bytes in zip(WAYS, json.loads(stdout), strict=True):
        assert peak_bytes <= TOTAL_BYTES / ways + TENSOR_BYTES + slack, ways


def test_source_and_destination_must_differ(tmp_path: Path) -> None:
    """Overwriting what is read is refused."""
    with pytest.raises(flat_param.CheckpointError, match="source and destination are both"):
        flat_param.reshard_checkpoint(tmp_path, tmp_path, world_size=2)
