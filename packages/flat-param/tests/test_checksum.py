"""The checksum of bytes in a file: as its note says, of every byte, and the same for ever."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flat_param.dcp._checksum import Checksums

BLOCK, COLUMNS = 1 << 20, 2053
ROW = 8 * COLUMNS
SIZES = (0, 1, 7, 8, ROW - 1, ROW, ROW + 1, 3 * ROW + 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 9)

Checksum = Callable[[bytes], int]


@pytest.fixture
def checksum(tmp_path: Path) -> Checksum:
    """That of a file's content, always with the same block."""
    path, sums = tmp_path / "data", Checksums()

    def compute(content: bytes) -> int:
        path.write_bytes(content)
        with path.open("rb") as file:
            return sums.of(file, 0, len(content))

    return compute


def _by_hand(data: bytes) -> int:
    """As Note [Checksum] has it, in Python's own numbers."""
    crc = 0
    for start in range(0, len(data), BLOCK):
        block = data[start : start + BLOCK]
        rows = len(block) // ROW
        if rows:
            words = memoryview(block)[: rows * ROW].cast("Q").tolist()
            sums = [sum(words[column::COLUMNS]) % 2**64 for column in range(COLUMNS)]
            crc = zlib.crc32(b"".join(each.to_bytes(8, "little") for each in sums), crc)
        crc = zlib.crc32(block[rows * ROW :], crc)
    return crc


def _random(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("size", SIZES)
def test_checksum_is_that_of_the_note(checksum: Checksum, size: int) -> None:
    """Of less than a row, of whole rows and blocks, and of one byte more or less."""
    data = _random(size)
    assert checksum(data) == _by_hand(data)


def test_checksums_on_disks_stay_right(checksum: Checksum) -> None:
    """A version that computed others would refuse every checkpoint there is."""
    assert checksum(b"") == 0
    assert checksum(b"flat-param") == 0x58A8A790
    assert checksum(bytes(range(256)) * 5000) == 0x295CA3D8
    assert checksum(b"\xff" * (BLOCK + ROW)) == 0xD3FBAD3D


@pytest.mark.parametrize("size", [ROW - 3, 2 * ROW + 11, BLOCK + 3 * ROW + 1])
def test_every_bit_counts(checksum: Checksum, size: int) -> None:
    """The first and the last of words, rows and blocks, and any others."""
    data, choose = _random(size), random.Random(0)
    first = checksum(data)
    places = {0, 7, 8, ROW - 1, ROW, BLOCK - 1, BLOCK, size - 1}
    for place in sorted({p for p in places if p < size} | set(choose.sample(range(size), 12))):
        changed = bytearray(data)
        changed[place] ^= 1 << choose.randrange(8)
        assert checksum(bytes(changed)) != first, place


@pytest.mark.parametrize(
    ("size", "one", "other"),
    [(4096, 1, 2), (4096, 3, 700), (4096, 0, 255), (512, 5, 526), (512, 9, 2000), (512, 0, 2047)],
)
def test_pages_and_sectors_that_change_places_are_noticed(
    checksum: Checksum, size: int, one: int, other: int
) -> None:
    """In one block and from one block to another."""
    data = _random(3 * BLOCK + 12_345)
    a, b = size * one, size * other
    moved = bytearray(data)
    moved[a : a + size], moved[b : b + size] = data[b : b + size], data[a : a + size]
    assert checksum(bytes(moved)) != checksum(data)


def test_blocks_that_change_places_are_noticed(checksum: Checksum) -> None:
    """Each is added to those before it."""
    first, second = _random(BLOCK), _random(BLOCK + 1)[:BLOCK]
    assert checksum(first + second) != checksum(second + first)


def test_block_before_leaves_nothing(checksum: Checksum) -> None:
    """The same object sums a large file, then a small one."""
    small = _random(ROW + 3)
    expected = checksum(small)
    checksum(b"\xff" * BLOCK)
    assert checksum(small) == expected


def test_part_of_a_file_is_summed_alone(tmp_path: Path) -> None:
    """Wherever the file stood; what lies around it changes nothing."""
    data = _random(5 * ROW)
    (tmp_path / "data").write_bytes(b"before" + data + b"after")
    sums = Checksums()
    with (tmp_path / "data").open("rb") as file:
        file.read(1000)
        assert sums.of(file, 6, len(data)) == _by_hand(data)
        assert sums.of(file, 6 + ROW, 0) == 0
        assert sums.of(file, 6 + ROW, ROW) == _by_hand(data[ROW : 2 * ROW])


@pytest.mark.parametrize("size", [0, 10, BLOCK, BLOCK + 3])
def test_file_that_ends_early_is_an_error(tmp_path: Path, size: int) -> None:
    """It says how many bytes are not there, whichever block they are of."""
    (tmp_path / "data").write_bytes(bytes(size))
    with (tmp_path / "data").open("rb") as file:
        with pytest.raises(EOFError, match=r"^the file ends 5 bytes early$"):
            Checksums().of(file, 0, size + 5)
        with pytest.raises(EOFError, match=r"^the file ends 5 bytes early$"):
            Checksums().of(file, size + 3, 5)
        with pytest.raises(EOFError, match=rf"^the file ends {2 * BLOCK} bytes early$"):
            Checksums().of(file, 0, size + 2 * BLOCK)


def test_modes_of_torch_change_nothing(tmp_path: Path) -> None:
    """A default device or inference mode is for what a user computes."""
    data = _random(2 * ROW)
    (tmp_path / "data").write_bytes(data)
    with (tmp_path / "data").open("rb") as file:
        with torch.device("meta"):
            assert Checksums().of(file, 0, len(data)) == _by_hand(data)
        sums = Checksums()
        with torch.inference_mode():
            assert sums.of(file, 0, len(data)) == _by_hand(data)
