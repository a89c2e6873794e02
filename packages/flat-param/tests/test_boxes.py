"""A stretch of elements as rectangles: exact, contiguous, few."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flat_param.layout._boxes import boxes_between

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(shape=SHAPES, data=st.data())
def test_boxes_cover_the_stretch_once_and_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    """Reading the boxes one after the other gives the elements, and there are at most 2n - 1."""
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    tensor = torch.arange(numel).view(shape)
    boxes = boxes_between(shape, start, stop)
    found: list[int] = []
    for box in boxes:
        part = tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))]
        assert part.flatten()[0] == box.start
        found += part.flatten().tolist()
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
