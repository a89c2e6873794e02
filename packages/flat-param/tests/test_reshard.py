"""Resharding a checkpoint: what is in the parts, and the memory that it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import flat_param
from flat_param.dcp._dcp_metadata import parse_metadata, read_bytes
from flat_param.dcp._stored import Stored

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


@pytest.mark.dist
@pytest.mark.slow
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


def _stored(path: Path) -> Stored:
    return parse_metadata(path, read_bytes(path))


def _places(stored: Stored, key: str) -> set[tuple[Any, ...]]:
    return {(each.offsets, each.sizes, each.place.path) for each in stored.tensor(key).chunks}


def _plain_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint of torch's own, of a model and its optimizer, by one process."""
    state: dict[str, Any] = {
        "model.w": torch.arange(12.0).reshape(4, 3),
        "model.b": torch.arange(4.0),
        "model.empty": torch.zeros(0, 3),
        "optim.state.w.exp_avg": torch.arange(12.0).reshape(4, 3) / 8,
        "optim.state.w.step": torch.tensor(5.0),
        "optim.param_groups.0.lr": 0.1,
        "model.note": "of torch",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return state


@pytest.mark.parametrize("ways", [1, 2])
def test_checkpoint_of_another_library_is_cut_as_one_unit(tmp_path: Path, ways: int) -> None:
    """Its parameters are one buffer; an optimizer's moments are cut like their parameter.

    Values that are no tensors, and a count of steps, are in the first part.
    """
    state = _plain_checkpoint(tmp_path / "old")
    flat_param.reshard_checkpoint(tmp_path / "old", tmp_path / "new", world_size=ways)
    new = _stored(tmp_path / "new")
    assert new.origin is not None
    (segment,) = new.origin.segments
    assert [spec.name for spec in segment.layout.specs] == ["w", "b", "empty"]
    assert set(new.entries) == set(_stored(tmp_path / "old").entries)
    assert _places(new, "optim.state.w.exp_avg") == _places(new, "model.w")
    files = {path for *_, path in _places(new, "model.w")}
    assert len(files) == ways
    assert _places(new, "optim.state.w.step") == {((), (), min(files))}
    found = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for key, value in state.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=tmp_path / "new", no_dist=True)
    for key, value in state.items():
        same = torch.equal(found[key], value) if torch.is_tensor(value) else found[key] == value
        assert same, key


def test_one_part_to_64_to_3_and_back_holds_the_same(tmp_path: Path) -> None:
    """Every cut has a file per rank, and torch reads the values of the last as they were."""
    state = {
        "model.w": torch.arange(700.0).reshape(70, 10),
        "optim.state.w.exp_avg": torch.arange(700.0).reshape(70, 10) / 8,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.save(state, checkpoint_id=tmp_path / "torch", no_dist=True)
    source = tmp_path / "torch"
    for index, ways in enumerate((1, 64, 3, 64, 1)):
        flat_param.reshard_checkpoint(source, tmp_path / f"{index}", world_size=ways)
        source = tmp_path / f"{index}"
        assert len(list(source.glob(f"*-rank-*-of-{ways}"))) == ways
        places = _places(_stored(source), "model.w")
        assert sum(rows * columns for _, (rows, columns), _ in places) == 700
        # 700 elements in aligned ranges of 12 fill 59 of 64 ranks.
        assert len({path for *_, path in places}) == min(ways, 59)
    found = {key: torch.zeros_like(value) for key, value in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=source, no_dist=True)
    assert all(torch.equal(found[key], value) for key, value in state.items())
