"""A tensor's elements are found in its archive, or torch is left to read it."""

from __future__ import annotations

import io
import sys
import zipfile
from typing import Any

import pytest
import torch

from flat_param.dcp._saved_tensor import SavedTensor, find_saved_tensor

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
    *(torch.complex64, torch.complex128),
)
SHAPES = ((), (5,), (3, 4), (2, 1, 3), (0,), (3, 0, 2), (1, 1))


def _saved(value: Any) -> memoryview:
    file = io.BytesIO()
    torch.save(value, file)
    return memoryview(file.getvalue())


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_elements_are_where_it_says(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of every kind and shape, at a multiple of 64 bytes."""
    tensor = torch.randint(0, 2, shape).to(dtype)
    data = _saved(tensor)
    found = find_saved_tensor(data)
    assert found is not None
    assert (found.dtype, found.sizes, found.nbytes) == (dtype, shape, tensor.nbytes)
    assert data[found.start : found.start + found.nbytes] == _bytes(tensor)
    if tensor.numel():
        assert not found.start % 64


def test_first_bytes_are_enough() -> None:
    """The rest may be on the disk still."""
    data = _saved(torch.ones(100, 1000))
    assert find_saved_tensor(data[:4096]) == find_saved_tensor(data)
    assert isinstance(find_saved_tensor(data[:4096]), SavedTensor)
    assert find_saved_tensor(data[:100]) is None


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, 4).t(),
        torch.ones(12)[2:5],
        torch.ones(3, 1).expand(3, 4),
        torch.ones(3).to_sparse(),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.ones(3)),
        [torch.ones(3)],
        {"a": 1},
        "text",
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_left_to_torch(value: Any) -> None:
    """Other orders, parts of a storage, other classes, and what is no tensor."""
    assert find_saved_tensor(_saved(value)) is None


def test_archive_of_another_machine_is_left_to_torch() -> None:
    """Its bytes are in another order."""
    data = bytes(_saved(torch.ones(3)))
    assert find_saved_tensor(memoryview(data)) is not None
    other = {"little": b"big   ", "big": b"little"}[sys.byteorder]
    assert find_saved_tensor(memoryview(data.replace(sys.byteorder.encode(), other))) is None


def test_compressed_archive_is_left_to_torch() -> None:
    """As other tools write them."""
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(_saved(torch.ones(3)))) as plain,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in plain.namelist():
            archive.writestr(name, plain.read(name))
    assert find_saved_tensor(memoryview(packed.getvalue())) is None


def test_damaged_heads_are_left_to_torch_or_point_elsewhere() -> None:
    """Nothing is raised, whichever byte is another; a checksum finds what it has read."""
    data = bytearray(_saved(torch.ones(3)))
    for place in range(800):
        for value in (0, 255, data[place] ^ 1):
            before, data[place] = data[place], value
            find_saved_tensor(memoryview(data))
            data[place] = before
