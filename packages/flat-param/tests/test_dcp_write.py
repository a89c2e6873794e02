"""Slices of tensors are written as a checkpoint of torch's format, down to the disk."""

from __future__ import annotations

import errno
import io
import os
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from flat_param import ParamSpec
from flat_param.dcp import _dcp_write
from flat_param.dcp._checksum import Checksums
from flat_param.dcp._dcp_metadata import METADATA, parse_metadata, read_bytes
from flat_param.dcp._dcp_write import DATA, sync_folder, write_file, write_folder
from flat_param.dcp._stored import Origin
from flat_param.dcp._tensor_slice import TensorSlice, whole

ORIGIN = Origin("0" * 12, 1, None, ())


def _loaded(folder, **like):
    """What torch's own reader makes of a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.load(like, checkpoint_id=folder, no_dist=True)
    return like


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(2, 2, dtype=torch.complex64),
        torch.tensor([True, False]),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}".removeprefix("torch."),
)
def test_torch_reads_what_was_written(tmp_path, tensor):
    """Of any dtype and shape; the memory order is not kept, values are."""
    stored = write_folder(tmp_path / "part", [whole("w", tensor)], {}, ORIGIN)
    found = _loaded(tmp_path / "part", w=torch.zeros_like(tensor))["w"]
    assert torch.equal(found, tensor)
    part = tmp_path / "part"
    assert parse_metadata(part, read_bytes(part)) == stored


def test_values_are_written_beside_tensors(tmp_path):
    """Small ones, each under its key."""
    values = {"lr": 0.1, "betas": (0.9, 0.99), "name": "adam", "none": None}
    write_folder(tmp_path / "part", [whole("w", torch.ones(2))], values, ORIGIN)
    found = _loaded(tmp_path / "part", **dict.fromkeys(values, 0), w=torch.zeros(2))
    assert {key: found[key] for key in values} == values


@pytest.mark.filterwarnings("ignore:.*[Ss]parse .*invariant")  # torch's own, on reading one
@pytest.mark.parametrize(
    "value",
    [
        torch.arange(8)[2:5],
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(1).expand(4),
        torch.nn.Parameter(torch.arange(3.0)),
        torch.eye(3).to_sparse(),
        torch.empty(0),
    ],
    ids=["a part", "transposed", "expanded", "a parameter", "sparse", "empty"],
)
def test_values_may_be_tensors_of_any_kind(tmp_path, value):
    """As what an optimizer keeps that is of no parameter's shape."""
    stored = write_folder(tmp_path / "part", [], {"value": value}, ORIGIN)
    place = stored.entries["value"]
    data = (tmp_path / "part" / DATA).read_bytes()
    data = data[place.offset : place.offset + place.length]
    found = torch.load(io.BytesIO(data), weights_only=True)
    assert found.layout is value.layout
    assert torch.equal(found.to_dense(), value.to_dense())


def test_slice_is_written_in_rectangles(tmp_path):
    """A slice that begins and ends in the middle of rows has up to three."""
    spec = ParamSpec("w", (4, 3), torch.float32, (3, 1))
    part = TensorSlice("w", spec, 2, torch.arange(2.0, 10.0))
    stored = write_folder(tmp_path / "part", [part], {}, ORIGIN)
    tensor = stored.entries["w"]
    assert tensor.shape == (4, 3)
    assert [(c.offsets, c.sizes) for c in tensor.chunks] == [
        ((0, 2), (1, 1)),
        ((1, 0), (2, 3)),
        ((3, 0), (1, 1)),
    ]


def test_each_place_has_the_sum_of_its_bytes(tmp_path):
    """Of what the file holds, read again; places lie side by side and fill the file."""
    tensors = [whole("a", torch.randn(5)), whole("b", torch.randn(2, 3))]
    stored = write_folder(tmp_path / "part", tensors, {"n": 3}, ORIGIN)
    places = list(stored.places())
    with (tmp_path / "part" / DATA).open("rb") as file:
        sums = [Checksums().of(file, place.offset, place.length) for place in places]
    assert [place.checksum for place in places] == sums
    assert len(set(sums)) == 3
    ends = [place.offset + place.length for place in places]
    assert [place.offset for place in places] == [0, *ends[:-1]]
    assert ends[-1] == (tmp_path / "part" / DATA).stat().st_size


def test_all_sums_are_waited_for(tmp_path, monkeypatch):
    """A thread works them out, behind what is written."""
    of = Checksums.of
    monkeypatch.setattr(Checksums, "of", lambda *args: (time.sleep(0.05), of(*args))[1])
    stored = write_folder(tmp_path / "part", [whole("w", torch.ones(3))], {"n": 3}, ORIGIN)
    assert all(place.checksum is not None for place in stored.places())


def test_file_is_on_the_disk_before_anything_says_that_it_is(tmp_path, monkeypatch):
    """What the disk refuses is raised, and there is no metadata."""

    def refused(file):
        time.sleep(0.05)
        raise OSError(errno.EIO, "the disk")

    monkeypatch.setattr(_dcp_write, "_to_disk", refused)
    with pytest.raises(OSError, match="the disk"):
        write_folder(tmp_path / "part", [whole("w", torch.ones(3))], {}, ORIGIN)
    assert not (tmp_path / "part" / METADATA).exists()


def test_view_of_a_large_storage_is_written_alone(tmp_path):
    """torch saves whole storages: a flat parameter would be written once for each piece."""
    large = torch.zeros(100_000)
    spec = ParamSpec("w", (4,), torch.float32, (1,))
    write_folder(tmp_path / "part", [TensorSlice("w", spec, 0, large[8:12])], {}, ORIGIN)
    assert (tmp_path / "part" / DATA).stat().st_size < 4_000


def test_written_tensor_is_not_changed(tmp_path):
    """Nor does it share memory with anything afterwards."""
    tensor = torch.ones(3, requires_grad=True)
    write_folder(tmp_path / "part", [whole("w", tensor)], {}, ORIGIN)
    assert tensor.requires_grad
    assert torch.equal(tensor, torch.ones(3))


@pytest.mark.parametrize("at", ["folder", "data"])
def test_nothing_that_is_there_is_written_over(tmp_path, at):
    """A folder belongs to one attempt."""
    folder = tmp_path / "part"
    folder.mkdir()
    if at == "data":
        with pytest.raises(FileExistsError):
            write_file(tmp_path / "part", b"x")
    with pytest.raises(FileExistsError):
        write_folder(folder, [], {}, ORIGIN)
    assert list(folder.iterdir()) == []


def test_metadata_is_written_last_and_everything_reaches_the_disk(tmp_path, monkeypatch):
    """A folder with metadata is complete, whenever the power goes."""
    log, folder, fsync = [], tmp_path / "part", os.fsync

    def noted(number):
        there = sorted(path.name for path in folder.iterdir())
        log.append((Path(os.readlink(f"/proc/self/fd/{number}")).name, there))
        fsync(number)

    monkeypatch.setattr(os, "fsync", noted)
    write_folder(folder, [whole("w", torch.ones(2))], {}, ORIGIN)
    both = sorted([METADATA, DATA])
    assert log == [(DATA, [DATA]), (METADATA, both), ("part", both)]


def test_disk_that_is_full_leaves_no_metadata(tmp_path, monkeypatch):
    """Whoever looks sees that the folder is no checkpoint."""

    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_folder(tmp_path / "part", [whole("w", torch.ones(2))], {}, ORIGIN)
    assert not (tmp_path / "part" / METADATA).exists()


def test_folder_is_closed_where_it_cannot_be_synced(tmp_path, monkeypatch):
    """Handles are few; on a system without folders to sync nothing is done."""
    opened = len(os.listdir("/proc/self/fd"))

    def broken(number):
        raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="the disk fails"):
        sync_folder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == opened
    monkeypatch.setattr(_dcp_write.os, "name", "nt")
    sync_folder(tmp_path)
