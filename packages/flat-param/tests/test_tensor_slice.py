"""A slice of a tensor as rectangles: the right elements at the right places, without a copy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flat_param import ParamSpec
from flat_param.dcp._tensor_slice import TensorSlice, whole

FEW = settings(max_examples=80, deadline=None, derandomize=True)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])


@st.composite
def tensors(draw: Any) -> Tensor:
    """Of any shape, with sides of zero and one, its dimensions in any order in memory."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    tensor = torch.arange(math.prod(shape)).view([shape[dim] for dim in order])
    return tensor.permute([order.index(dim) for dim in range(len(shape))])


def _placed(shape: tuple[int, ...], piece: TensorSlice) -> tuple[Tensor, Tensor]:
    """The tensor that the rectangles make up, and how often each element was written."""
    found = torch.zeros(shape, dtype=piece.elements.dtype)
    times = torch.zeros(shape, dtype=torch.int64)
    for offsets, view in piece.boxes():
        at = tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))
        found[at] = view
        times[at] += 1
    return found, times


@FEW
@given(tensors(), st.data())
def test_rectangles_of_the_parts_make_up_the_tensor(tensor: Tensor, data: st.DataObject) -> None:
    """Cut anywhere in memory order, and put where they say, they are the tensor, each once."""
    spec = ParamSpec("w", tuple(tensor.shape), tensor.dtype, tensor.stride())
    memory = tensor.as_strided((tensor.numel(),), (1,))
    cut = data.draw(st.integers(0, tensor.numel()))
    pieces = [
        TensorSlice("w", spec, start, memory[start:stop])
        for start, stop in ((0, cut), (cut, tensor.numel()))
    ]
    made = [_placed(spec.shape, piece) for piece in pieces]
    assert torch.equal(made[0][0] + made[1][0], tensor)
    assert ((made[0][1] + made[1][1]) == 1).all()


@FEW
@given(tensors(), DTYPES)
def test_whole_tensor_is_one_slice(tensor: Tensor, dtype: torch.dtype) -> None:
    """One rectangle of the tensor's shape and values, whatever its strides."""
    tensor = tensor.to(dtype)
    piece = whole("model.w", tensor)
    ((offsets, view),) = piece.boxes()
    assert offsets == (0,) * tensor.dim()
    assert torch.equal(view, tensor)
    assert (piece.key, piece.spec.shape, piece.spec.dtype) == ("model.w", tensor.shape, dtype)


def test_what_is_written_to_a_rectangle_is_in_the_slice() -> None:
    """That is how a load fills it: rectangles are views."""
    elements = torch.zeros(5)
    spec = ParamSpec("w", (3, 4), torch.float32, (1, 3))
    for _, view in TensorSlice("w", spec, 4, elements).boxes():
        view += 1
    assert elements.tolist() == [1.0] * 5


def test_places_are_those_of_the_tensor_not_of_its_memory() -> None:
    """Elements 4 to 6 of a column-major 3 x 4: column 1 from row 1, and the top of column 2."""
    memory = torch.arange(12.0)
    spec = ParamSpec("w", (3, 4), torch.float32, (1, 3))
    boxes = TensorSlice("w", spec, 4, memory[4:7]).boxes()
    assert [(at, view.tolist()) for at, view in boxes] == [
        ((1, 1), [[4.0], [5.0]]),
        ((0, 2), [[6.0]]),
    ]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 3)])
def test_tensor_without_elements_is_one_rectangle_of_its_shape(shape: tuple[int, ...]) -> None:
    """So that a checkpoint has it, of the dtype it has, wherever it is cut."""
    spec = ParamSpec("w", shape, torch.float32)
    ((offsets, view),) = TensorSlice("w", spec, 0, torch.empty(0, dtype=torch.bfloat16)).boxes()
    assert offsets == (0,) * len(shape)
    assert (tuple(view.shape), view.dtype) == (shape, torch.bfloat16)


def test_no_elements_of_a_tensor_that_has_some_are_no_rectangle() -> None:
    """A rank that holds nothing of it stores nothing of it."""
    spec = ParamSpec("w", (2, 3), torch.float32)
    assert TensorSlice("w", spec, 6, torch.empty(0)).boxes() == ()


def test_number_is_a_rectangle_of_no_dimensions() -> None:
    """Such as a count of steps."""
    assert whole("s", torch.tensor(7.0)).boxes() == (((), torch.tensor(7.0)),)


def test_whole_tensor_needs_no_gradient_and_no_copy_where_it_is_in_order() -> None:
    """A load writes to it; only what lies otherwise in memory is copied."""
    tensor = torch.ones(3, 2, requires_grad=True)
    elements = whole("w", tensor).elements
    assert not elements.requires_grad
    assert elements.data_ptr() == tensor.data_ptr()
    assert whole("w", tensor.t()).elements.data_ptr() != tensor.data_ptr()
    assert whole("w", torch.ones(1).expand(3)).elements.tolist() == [1.0] * 3
