"""A tensor is the bytes of its storage and a view of them, and can be made again of both."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from ckpt_wrap.offload._storage import flat_bytes, forget_bytes, is_plain, split, view_of


class Tagged(torch.Tensor):
    """A subclass without a dispatch of its own."""


TENSORS = {
    "whole": lambda: torch.arange(12.0).view(3, 4),
    "transposed": lambda: torch.arange(12).view(3, 4).t(),
    "offset": lambda: torch.arange(12.0)[5:9],
    "expanded": lambda: torch.ones(1, 3).expand(5, 3),
    "channels last": lambda: torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "no elements": lambda: torch.ones(0, 3),
    "no dimensions": lambda: torch.tensor(7, dtype=torch.int16),
    "bool": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.tensor([1 + 2j]),
    "subclass": lambda: torch.arange(3.0).as_subclass(Tagged),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_a_tensor_is_made_again_of_a_copy_of_its_bytes(make):
    """Values, type, shape, strides and offset."""
    tensor = make()
    again = view_of(tensor).of(flat_bytes(tensor).clone())
    assert type(again) is type(tensor)
    assert torch.equal(again, tensor)
    assert again.stride() == tensor.stride()
    assert again.storage_offset() == tensor.storage_offset()
    assert again.dtype is tensor.dtype


def test_a_parameter_is_made_again_as_a_tensor():
    """As autograd hands out what it saved of one."""
    assert type(view_of(nn.Parameter(torch.ones(2))).of(torch.zeros(8, dtype=torch.uint8))) is (
        torch.Tensor
    )


def test_flat_bytes_are_those_of_the_storage_and_no_copy():
    """All of them, whichever part the tensor shows."""
    base = torch.zeros(6, dtype=torch.int32)
    flat = flat_bytes(base[2:4])
    assert (flat.dtype, flat.shape) == (torch.uint8, (24,))
    flat[20] = 5
    assert base[5] == 5


def test_a_tensor_without_its_bytes_shares_versions_still():
    """So that a change of the others is noticed when the bytes have gone."""
    tensor = torch.zeros(4)
    guard = tensor.detach()
    forget_bytes(guard)
    assert guard.untyped_storage().nbytes() == 0
    assert tensor.untyped_storage().nbytes() == 16
    before = guard._version
    tensor.add_(1)
    assert guard._version == before + 1


def test_plain_are_tensors_that_are_bytes_and_a_view():
    """A subclass as well, if operators see nothing of it."""
    assert is_plain(torch.ones(2))
    assert is_plain(nn.Parameter(torch.ones(2)))
    assert is_plain(torch.ones(2).as_subclass(Tagged))


NOT_PLAIN = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "meta": lambda: torch.ones(2, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(2)),
}


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
@pytest.mark.parametrize("make", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_what_is_more_than_bytes_is_not_plain(make):
    """It would come back as something else, or has no bytes."""
    assert not is_plain(make())


def test_a_subclass_of_two_tensors_is_taken_apart(two_parts):
    """By the names it gives; others say nothing."""
    a, b = torch.ones(2), torch.zeros(2)
    parts, context = split(two_parts(a, b))
    assert parts["a"] is a
    assert parts["b"] is b
    assert context is None
    assert split(torch.ones(2)) is None
