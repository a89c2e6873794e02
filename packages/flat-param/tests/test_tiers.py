"""Where optimizer state lies between steps."""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flat_param import StateError
from flat_param.offload._tiers import FolderTier, HostTier, lay_out

MIB = 1 << 20


def _values() -> list[Tensor]:
    return [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0, dtype=torch.float64).view(3, 2).t(),
        torch.arange(5, dtype=torch.bfloat16),
        torch.arange(4.0).expand(2, 4),
    ]


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_what_is_laid_out_has_the_values_dtypes_and_order(kind: str, tmp_path: Path) -> None:
    """Transposed tensors stay so, expanded ones get memory for all elements; nothing overlaps."""
    values = _values()
    places = lay_out(values, HostTier() if kind == "memory" else FolderTier(tmp_path))
    for value, place in zip(values, places, strict=True):
        place.copy_(value)
    for value, place in zip(values, places, strict=True):
        assert torch.equal(place, value)
        assert place.dtype == value.dtype
    assert places[1].stride() == values[1].stride()
    assert places[3].stride() == (4, 1)
    assert len({place.untyped_storage().data_ptr() for place in places}) == 1


def test_file_has_no_name_and_takes_its_room_at_once(tmp_path: Path) -> None:
    """Nothing is left in the folder, whatever becomes of the process."""
    memory = FolderTier(tmp_path).allocate(3 * MIB)
    assert list(tmp_path.iterdir()) == []
    maps = Path("/proc/self/maps")
    if maps.exists():
        lines = [line for line in maps.read_text().splitlines() if str(tmp_path) in line]
        assert any(line.endswith("(deleted)") for line in lines)
    assert memory.numel() == 3 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other limits")
def test_disk_that_is_full_is_an_error_with_the_folder(tmp_path: Path) -> None:
    """The system refuses files of more than a mebibyte here, as a full disk does."""
    tier = FolderTier(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        with pytest.raises(StateError, match=f"{2 * MIB} bytes of state cannot be written to"):
            tier.allocate(2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    assert tier.allocate(2 * MIB).numel() == 2 * MIB


def test_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    """At once, and by its path."""
    text = (
        "flat_param.offload_optimizer: 64 bytes of state cannot be written to folder "
        f"'{tmp_path}/none' ({os.strerror(errno.ENOENT)}), but state is kept in files there. Pass "
        "a writable folder that has room for all of it."
    )
    with pytest.raises(StateError, match=re.escape(text)):
        FolderTier(tmp_path / "none")


def test_where_the_system_cannot_reserve_zeros_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take the room as well."""
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    written: list[int] = []
    write = os.write

    def note(handle: int, data: Any) -> int:
        written.append(len(data))
        return write(handle, data)

    monkeypatch.setattr(os, "write", note)
    memory = FolderTier(tmp_path).allocate(2 * MIB + 5)
    assert sum(written) == 64 + 2 * MIB + 5
    assert not memory.any()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_is_told_whose_files_they_are(tmp_path: Path) -> None:
    """In its own words, and the parent goes on."""
    tier, said = FolderTier(tmp_path), tmp_path / "said"
    child = os.fork()
    if not child:
        try:
            tier.check()
        except StateError as error:
            said.write_text(str(error))
        os._exit(0)
    os.waitpid(child, 0)
    assert said.read_text() == (
        f"flat_param.offload_optimizer: process {child} was forked from {os.getpid()}, whose state "
        f"is in folder '{tmp_path}', but both would write to it. Build an optimizer in the new "
        "process."
    )
    tier.check()
    HostTier().check()


def test_state_on_the_cpu_is_where_cpu_memory_is() -> None:
    """And nowhere near a folder."""
    assert not HostTier().moves(torch.device("cpu"))
    assert HostTier().moves(torch.device("meta"))


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_cpu_memory_is_pinned_where_there_is_an_accelerator() -> None:
    """So that copies do not stop the host."""
    assert HostTier().allocate(100).is_pinned()
