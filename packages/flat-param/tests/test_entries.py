"""Entries of a checkpoint go from the file to where they belong, each byte once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flat_param import CheckpointError
from flat_param.dcp import _checksum, _entries, _read_ahead
from flat_param.dcp._dcp_read import read_folder
from flat_param.dcp._dcp_write import write_folder
from flat_param.dcp._entries import EntryFile, Read
from flat_param.dcp._stored import Origin, Place, Stored, StoredChunk
from flat_param.dcp._tensor_slice import TensorSlice, whole
from flat_param.layout._spec import ParamSpec

ROWS, COLUMNS = 700, 1000  # more than two blocks of a checksum


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Stored, Tensor]:
    """A checkpoint of one tensor, its metadata, and the tensor."""
    tensor = torch.randn(ROWS, COLUMNS)
    origin = Origin("attempt", 1, None, ())
    return (
        tmp_path / "saved",
        write_folder(tmp_path / "saved", [whole("a", tensor)], {}, origin),
        tensor,
    )


class Copies(TorchDispatchMode):
    """Counts the bytes that torch copies."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any operator that copies."""
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
            self.nbytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def _read_bytes() -> int:
    """Of all files, by the system's own count."""
    return int(Path("/proc/self/io").read_text().split()[1])


def _rows(elements: Tensor, start: int) -> TensorSlice:
    spec = ParamSpec("a", (ROWS, COLUMNS), torch.float32, (COLUMNS, 1))
    return TensorSlice("a", spec, start * COLUMNS, elements)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is read")
@pytest.mark.parametrize(("start", "stop"), [(0, ROWS), (0, 1), (13, 600), (ROWS - 1, ROWS)])
def test_every_byte_is_read_once_and_copied_by_nobody(
    saved: tuple[Path, Stored, Tensor], monkeypatch: pytest.MonkeyPatch, start: int, stop: int
) -> None:
    """The whole tensor or some of its rows, each with its checksum.

    What only has the disk read is left out: it hands over no bytes.
    """
    monkeypatch.setattr(_read_ahead, "_read_at", lambda *_: 0)
    folder, stored, tensor = saved
    found = torch.zeros((stop - start) * COLUMNS)
    (place,) = stored.places()
    for _ in range(2):  # the first time, modules are imported
        before = _read_bytes()
        with Copies() as copies:
            read_folder(folder, stored, [_rows(found, start)])
    assert _read_bytes() - before < place.length + (1 << 14)
    assert not copies.nbytes
    assert torch.equal(found.view(-1, COLUMNS), tensor[start:stop])


def _columns(found: Tensor) -> TensorSlice:
    spec = ParamSpec("a", (ROWS, COLUMNS), torch.float32, (1, ROWS))  # column by column
    return TensorSlice("a", spec, 3 * ROWS, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_order_or_dtype_is_copied_from_a_rectangle(
    saved: tuple[Path, Stored, Tensor], dtype: torch.dtype
) -> None:
    """Columns of what was saved by rows; float64 of float32."""
    folder, stored, tensor = saved
    found = torch.zeros(5 * ROWS, dtype=dtype)
    with Copies() as copies:
        read_folder(folder, stored, [_columns(found)])
    assert copies.nbytes == found.nbytes
    assert torch.equal(found.view(5, ROWS), tensor[:, 3:8].t().to(dtype))


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_memory_that_begins_between_words_is_filled_too(
    saved: tuple[Path, Stored, Tensor], offset: int
) -> None:
    """And what lies around it stays."""
    folder, stored, tensor = saved
    memory = torch.full((ROWS * COLUMNS + 8,), 7.0)
    read_folder(folder, stored, [_rows(memory[offset : offset + tensor.numel()], 0)])
    assert torch.equal(memory[offset : offset + tensor.numel()], tensor.view(-1))
    assert set(memory[:offset].tolist()) | set(memory[offset + tensor.numel() :].tolist()) == {7.0}


def test_autograd_is_told_that_a_tensor_was_written_to(
    saved: tuple[Path, Stored, Tensor],
) -> None:
    """As an operator in place would: ranks count these, too."""
    folder, stored, _ = saved
    found = torch.zeros(ROWS * COLUMNS)
    before = found._version
    read_folder(folder, stored, [_rows(found, 0)])
    assert found._version > before


def test_what_is_overwritten_is_handed_out_before(saved: tuple[Path, Stored, Tensor]) -> None:
    """With the values that it had."""
    folder, stored, tensor = saved
    found, kept = torch.full((ROWS * COLUMNS,), 7.0), list[Tensor]()
    read_folder(
        folder,
        stored,
        [_rows(found, 0)],
        keep=lambda targets: kept.extend(map(torch.clone, targets)),
    )
    assert torch.equal(torch.cat([each.view(-1) for each in kept]), torch.full_like(found, 7.0))
    assert torch.equal(found.view(ROWS, COLUMNS), tensor)


def test_error_of_handing_out_is_raised(saved: tuple[Path, Stored, Tensor]) -> None:
    """Nothing is overwritten then."""
    folder, stored, _ = saved
    found = torch.full((ROWS * COLUMNS,), 7.0)

    def fail(_: Any) -> None:
        raise MemoryError("no room")

    with pytest.raises(CheckpointError, match="no room"):
        read_folder(folder, stored, [_rows(found, 0)], keep=fail)
    assert set(found.tolist()) == {7.0}


@pytest.mark.parametrize("block", [0, 1, 2])
def test_ctrl_c_between_blocks_comes_out_as_it_is(
    saved: tuple[Path, Stored, Tensor], monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """A checkpoint does not seem damaged."""
    folder, stored, _ = saved
    left, real = [block], _checksum._fill

    def interrupted(*args: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(_checksum, "_fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read_folder(folder, stored, [_rows(torch.zeros(ROWS * COLUMNS), 0)])


def test_few_bytes_at_a_time_are_enough(
    saved: tuple[Path, Stored, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system may give fewer than were asked for."""
    folder, stored, tensor = saved
    found, real = torch.zeros(ROWS * COLUMNS), _checksum._fill

    class Slow:
        def __init__(self, file: Any) -> None:
            self.file = file

        def readinto(self, block: memoryview) -> int:
            few: int = self.file.readinto(block[:70_001])
            return few

    monkeypatch.setattr(_checksum, "_fill", lambda block, file: real(block, Slow(file)))
    read_folder(folder, stored, [_rows(found, 0)])
    assert torch.equal(found.view(ROWS, COLUMNS), tensor)


def test_entry_that_ends_inside_its_elements_is_an_error(
    saved: tuple[Path, Stored, Tensor],
) -> None:
    """Also where no checksum says so, as in FSDP2's checkpoints."""
    folder, stored, tensor = saved
    (place,) = stored.places()
    cut = Place(place.path, place.offset, tensor.nbytes // 2)
    found = torch.zeros(ROWS, COLUMNS)
    chunk = StoredChunk((0, 0), (ROWS, COLUMNS), cut)
    read = Read("a", cut, chunk, torch.float32, [((slice(0, ROWS), slice(0, COLUMNS)), found)])
    with EntryFile(folder / place.path) as file, pytest.raises(Exception, match=r"zip|archive"):
        list(file.read([read]))
    assert not found.any()


@pytest.mark.parametrize("change", ["dtype", "sizes"])
def test_tensor_of_another_kind_than_the_metadata_says_is_refused(
    saved: tuple[Path, Stored, Tensor], change: str
) -> None:
    """By name, and nothing is filled."""
    folder, stored, _ = saved
    (place,) = stored.places()
    dtype = torch.int32 if change == "dtype" else torch.float32
    sizes = (COLUMNS, ROWS) if change == "sizes" else (ROWS, COLUMNS)
    found = torch.zeros(sizes, dtype=dtype)
    full = tuple(slice(0, size) for size in sizes)
    read = Read("a", place, StoredChunk((0, 0), sizes, place), dtype, [(full, found)])
    with (
        EntryFile(folder / place.path) as file,
        pytest.raises(CheckpointError, match="The checkpoint is damaged"),
    ):
        list(file.read([read]))
    assert not found.any()


def test_torch_reads_what_is_not_understood(
    saved: tuple[Path, Stored, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A format of torch's to come."""
    folder, stored, tensor = saved
    monkeypatch.setattr(_entries, "find_saved_tensor", lambda _: None)
    found = torch.zeros(ROWS * COLUMNS)
    read_folder(folder, stored, [_rows(found, 0)])
    assert torch.equal(found.view(ROWS, COLUMNS), tensor)
