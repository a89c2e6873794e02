"""Copies on the host lie one after another, and are as large as what they are of."""

from __future__ import annotations

import pytest
import torch

from flat_param.memory import _host_room
from flat_param.memory._host_room import HostRoom

TENSORS = (
    torch.arange(5.0),
    torch.ones(3, 4, dtype=torch.bfloat16).t(),
    torch.tensor(7),
    torch.zeros(0, 3),
    torch.ones(2, dtype=torch.complex64).conj(),
    torch.rand(9, requires_grad=True),
)


def test_copies_equal_what_they_are_of() -> None:
    """Whatever its shape and dtype; outside autograd, and in memory of their own."""
    room = HostRoom(TENSORS)
    copies = [room.copy(tensor) for tensor in TENSORS]
    for tensor, copied in zip(TENSORS, copies, strict=True):
        assert torch.equal(copied, tensor)
        assert (copied.dtype, copied.shape) == (tensor.dtype, tensor.shape)
        assert copied.is_contiguous()
        assert not copied.requires_grad
        assert not tensor.numel() or copied.data_ptr() != tensor.data_ptr()


def test_all_that_was_named_is_in_one_piece_of_memory() -> None:
    """For which huge pages are asked once."""
    room = HostRoom(TENSORS)
    assert len({room.copy(tensor).untyped_storage().data_ptr() for tensor in TENSORS}) == 1


def test_huge_pages_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all room at once."""
    asked = list[int]()
    monkeypatch.setattr(_host_room, "prefer_huge_pages", lambda room: asked.append(room.nbytes))
    tensors = [torch.ones(1000)] * 3
    room = HostRoom(tensors)
    for tensor in tensors:
        room.copy(tensor)
    assert asked == [3 * 4032]


def test_more_than_was_named_has_room_too() -> None:
    """In more memory."""
    room = HostRoom([torch.ones(3)])
    copies = [room.copy(torch.full((100,), float(value))) for value in range(3)]
    assert [copied[99].item() for copied in copies] == [0.0, 1.0, 2.0]


def test_default_device_changes_nothing() -> None:
    """It is for what a user makes."""
    with torch.device("meta"):
        room = HostRoom([torch.ones(3, device="cpu")])
        assert room.copy(torch.ones(3, device="cpu")).device.type == "cpu"
