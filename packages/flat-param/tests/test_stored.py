"""What a checkpoint holds is checked once: rectangles, bytes, and that parts make up one state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flat_param import CheckpointError
from flat_param.dcp._stored import (
    Origin,
    Place,
    Stored,
    StoredChunk,
    StoredTensor,
    check_places,
    check_tensor,
    merge,
)

ORIGIN = Origin("0" * 12, 2, None, ())


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], *, length: int = 99) -> StoredChunk:
    return StoredChunk(offsets, sizes, Place("data", 0, length, 7))


def _tensor(
    shape: tuple[int, ...], *chunks: StoredChunk, dtype: torch.dtype = torch.float32
) -> StoredTensor:
    return StoredTensor(dtype, shape, chunks)


TOP = _tensor((4, 3), _chunk((0, 0), (1, 3)))
REST = _tensor((4, 3), _chunk((1, 0), (3, 3)))


def _says(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        call()
    assert str(raised.value) == words


def test_tensor_that_is_there_is_given() -> None:
    """Of the shape that is asked for, or of any; of no elements or of one number, too."""
    empty, number = _tensor((0, 3), _chunk((0, 0), (0, 3))), _tensor((), _chunk((), ()))
    for tensor in (empty, number, _tensor((0,)), _tensor((3,), _chunk((0,), (3,)))):
        stored = Stored({"w": tensor})
        assert stored.tensor("w") is stored.tensor("w", tensor.shape) is tensor
        assert tensor.numel_stored == math.prod(tensor.shape)


@pytest.mark.parametrize("entries", [{}, {"model.w": Place("data", 0, 9)}])
def test_key_that_is_no_tensor_is_refused(entries: dict[str, Any]) -> None:
    """Where there is none, and where it is a value."""
    _says(
        lambda: Stored(entries).tensor("model.w"),
        "flat_param.load: tensor 'model.w' is not in the checkpoint, but the module has it. "
        "Load a checkpoint of the same model.",
    )


def test_tensor_of_another_shape_is_refused() -> None:
    """Also one of as many elements."""
    stored = Stored({"w": _tensor((4, 3), _chunk((0, 0), (4, 3)))})
    _says(
        lambda: stored.tensor("w", (3, 4)),
        "flat_param.load: tensor 'w' has shape (4, 3) in the checkpoint, but (3, 4) in the module. "
        "Load a checkpoint of the same model.",
    )


@pytest.mark.parametrize(("chunks", "found"), [((), 0), (TOP.chunks, 3)])
def test_tensor_that_is_stored_in_part_is_refused(
    chunks: tuple[StoredChunk, ...], found: int
) -> None:
    """Whoever asks for it would allocate what is not there."""
    _says(
        lambda: Stored({"w": _tensor((4, 3), *chunks)}).tensor("w"),
        f"flat_param.load: 'w' has {found} of its 12 elements in the checkpoint, but all must be "
        "stored. Load a complete checkpoint.",
    )


def test_places_are_those_of_values_and_of_rectangles() -> None:
    """All of them, in order."""
    value = Place("other", 5, 6)
    stored = Stored({"a": TOP, "b": value, "c": REST, "d": _tensor((0,))})
    assert list(stored.places()) == [TOP.chunks[0].place, value, REST.chunks[0].place]


def test_parts_are_merged_with_their_folders() -> None:
    """Rectangles of one tensor come together, and all paths are from the common folder."""
    parts = [("one", Stored({"w": TOP, "v": Place("x", 1, 2, 3)})), ("two", Stored({"w": REST}))]
    merged = merge(parts, ORIGIN)
    assert merged.origin is ORIGIN
    assert merged.entries["v"] == Place("one/x", 1, 2, 3)
    assert merged.entries["w"] == _tensor(
        (4, 3),
        StoredChunk((0, 0), (1, 3), Place("one/data", 0, 99, 7)),
        StoredChunk((1, 0), (3, 3), Place("two/data", 0, 99, 7)),
    )


def test_nothing_is_merged_from_nothing() -> None:
    """A part without entries adds none."""
    assert merge([("one", Stored()), ("two", Stored())], ORIGIN) == Stored({}, ORIGIN)


def test_parts_of_another_shape_are_refused() -> None:
    """Both shapes are named."""
    parts = [("one", Stored({"w": TOP})), ("two", Stored({"w": _tensor((3, 4))}))]
    _says(
        lambda: merge(parts, ORIGIN),
        "flat_param.save_sharded: tensor 'w' has shape (4, 3) on one rank and (3, 4) on another, "
        "but ranks must save one model. Build the same model on every rank.",
    )


@pytest.mark.parametrize("first", [0, 1])
def test_tensor_on_one_rank_and_value_on_another_are_refused(first: int) -> None:
    """Whichever comes first: neither takes the other's place."""
    both = [("one", Stored({"w": TOP})), ("two", Stored({"w": Place("data", 0, 9)}))]
    shapes = ["(4, 3)", "no shape"]
    _says(
        lambda: merge([both[first], both[1 - first]], ORIGIN),
        f"flat_param.save_sharded: tensor 'w' has shape {shapes[first]} on one rank and "
        f"{shapes[1 - first]} on another, but ranks must save one model. "
        "Build the same model on every rank.",
    )


def test_parts_of_another_dtype_are_refused() -> None:
    """The metadata has one for all rectangles, and the others could not be loaded."""
    half = _tensor((4, 3), *REST.chunks, dtype=torch.bfloat16)
    _says(
        lambda: merge([("one", Stored({"w": TOP})), ("two", Stored({"w": half}))], ORIGIN),
        "flat_param.save_sharded: tensor 'w' is torch.float32 on one rank and torch.bfloat16 on "
        "another, but ranks must save one model. Build the same model and optimizer on every rank.",
    )


@pytest.mark.parametrize(("rest", "found"), [(TOP, 6), (_tensor((4, 3)), 3)])
def test_parts_that_are_not_the_whole_are_refused(rest: StoredTensor, found: int) -> None:
    """Where a rank has none of it, or less than its part."""
    _says(
        lambda: merge([("one", Stored({"w": TOP})), ("two", Stored({"w": rest}))], ORIGIN),
        f"flat_param.save_sharded: ranks have {found} elements of tensor 'w', but it has 12. "
        "Let every rank train the same parameters with the same optimizer.",
    )


def test_parts_that_are_more_than_the_whole_are_refused() -> None:
    """A rectangle that two ranks have would be stored twice."""
    parts = [(name, Stored({"w": REST})) for name in ("one", "two")]
    with pytest.raises(
        CheckpointError, match="ranks have 18 elements of tensor 'w', but it has 12"
    ):
        merge(parts, ORIGIN)


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (_chunk((0,), (4,)), "has 1 dimensions, but the tensor has 2"),
        (_chunk((0, 0), (4,)), "has 1 dimensions, but the tensor has 2"),
        (_chunk((0,), (4, 3)), "has 2 dimensions, but the tensor has 2"),
        (_chunk((0, 0, 0), (4, 3, 1)), "has 3 dimensions, but the tensor has 2"),
        (_chunk((0, 1), (4, 3)), "ends outside of the tensor's shape (4, 3)"),
        (_chunk((4, 0), (1, 3)), "ends outside of the tensor's shape (4, 3)"),
        (_chunk((0, 0), (4, 3), length=47), "has shape (4, 3), but only 47 bytes are stored"),
    ],
)
def test_rectangle_that_cannot_be_is_refused(chunk: StoredChunk, reason: str) -> None:
    """Of other dimensions, outside of its tensor, or larger than its bytes; a good one before."""
    _says(
        lambda: check_tensor("w" * 90, _tensor((4, 3), *REST.chunks, chunk)),
        f"flat_param.load: a stored rectangle of '{'w' * 80}' {reason}. "
        "The metadata is damaged: load another checkpoint.",
    )


def test_rectangles_at_the_limits_are_taken() -> None:
    """To the last row and the last byte; of no elements; of a number."""
    check_tensor("w", _tensor((4, 3), _chunk((1, 0), (3, 3), length=36), _chunk((4, 3), (0, 0))))
    check_tensor("w", _tensor((4, 3), _chunk((0, 0), (4, 3), length=24), dtype=torch.bfloat16))
    check_tensor("w", _tensor((), _chunk((), (), length=4)))
    check_tensor("w", _tensor((0, 3), _chunk((0, 0), (0, 3), length=0)))


def test_file_has_to_reach_the_last_byte_that_is_claimed() -> None:
    """Whatever the order; files are counted apart, and nothing is claimed of none."""
    places = [Place("a", 10, 5), Place("b", 0, 1), Place("a", 0, 10), Place("a", 12, 0)]
    assert check_places(places) == {"a": 15, "b": 1}
    assert check_places([Place("a", 7, 0)]) == {"a": 7}
    assert check_places([]) == {}


@pytest.mark.parametrize(
    ("places", "byte"),
    [
        ([(0, 10), (9, 5)], 9),
        ([(0, 10), (0, 10)], 0),
        ([(0, 100), (10, 5), (20, 5)], 10),
        ([(0, 100), (10, 0), (50, 1)], 50),
        ([(50, 1), (0, 100)], 50),
        ([(0, 4), (4, 4), (8, 0), (7, 1)], 7),
    ],
)
def test_bytes_claimed_twice_are_refused(places: list[tuple[int, int]], byte: int) -> None:
    """The first such byte is named; a claim of no bytes claims none."""
    path = "p" * 90
    _says(
        lambda: check_places([Place(path, *place) for place in places]),
        f"flat_param.load: the metadata claims byte {byte} of '{'p' * 80}' for two entries, but "
        "entries must not overlap. It is damaged: load another checkpoint.",
    )


def test_merging_many_rectangles_takes_linear_time() -> None:
    """Sixteen times as many parts take about sixteen times as long, in this process's time."""

    def seconds(count: int) -> float:
        parts = [
            (str(row), Stored({"w": _tensor((count, 1), _chunk((row, 0), (1, 1)))}))
            for row in range(count)
        ]
        spent = []
        for _ in range(3):  # the shortest: a collection of the whole heap may come in between
            start = time.process_time()
            merge(parts, ORIGIN)
            spent.append(time.process_time() - start)
        return min(spent)

    seconds(10)
    assert seconds(16_000) < 100 * max(seconds(1_000), 0.001)
