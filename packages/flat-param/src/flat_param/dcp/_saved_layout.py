"""How a sharded checkpoint was cut, so that it can be cut anew without the model.

It is stored as JSON in the metadata; values are in the checkpoint itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from .._errors import CheckpointError
from ..layout._boundary import Blocks, Boundary, PerParameter, Word, check_boundary
from ..layout._layout import FlatLayout, plan_layout
from ..layout._spec import ParamSpec


@dataclass(frozen=True)
class SavedSegment:
    """One segment of a unit, with qualified parameter names.

    Args:
        layout: where the parameters lie.
        boundary: where shards may end.
    """

    layout: FlatLayout
    boundary: Boundary


def encode(segments: Iterable[SavedSegment]) -> list[dict[str, Any]]:
    """Segments as values that JSON has.

    Example:
        >>> layout = plan_layout([ParamSpec("w", (3, 2), torch.float32)])
        >>> decode(encode([SavedSegment(layout, "row")]))[0].boundary
        'row'
    """
    return [_segment_fields(segment) for segment in segments]


def _segment_fields(segment: SavedSegment) -> dict[str, Any]:
    return {
        "dtype": str(segment.layout.dtype).removeprefix("torch."),
        "boundary": _boundary_fields(segment.boundary),
        "params": [
            {"names": list(spec.names), "shape": list(spec.shape), "stride": list(spec.stride)}
            for spec in segment.layout.specs
        ],
    }


def _boundary_fields(boundary: Boundary) -> Any:
    if isinstance(boundary, PerParameter):
        return [_boundary_fields(each) for _, each in boundary.choices]
    if not isinstance(boundary, Blocks):
        return boundary
    shape = boundary.shape
    return {"blocks": shape if isinstance(shape, int) else list(shape)}


def _boundary(fields: Any, specs: Sequence[ParamSpec]) -> Boundary:
    if isinstance(fields, list):
        each = [_one_boundary(own) for own in fields]
        pairs = zip(specs, each, strict=True)
        return PerParameter(tuple((spec.name, own) for spec, own in pairs))
    return _one_boundary(fields)


def _one_boundary(fields: Any) -> Word | Blocks:
    if isinstance(fields, dict):
        shape = fields["blocks"]
        return Blocks(tuple(shape) if type(shape) is list else _of(int, shape))
    check_boundary(_of(str, fields))
    return cast(Word, fields)


def decode(fields: Any) -> tuple[SavedSegment, ...]:
    """Segments from such values.

    Raises:
        CheckpointError: they are not what `encode` gives.
    """
    try:
        return tuple(_segment(each) for each in _of(list, fields))
    except Exception as error:  # whatever is in there, the planner of layouts may fail at it
        raise CheckpointError(
            "flat_param.load: the layout in the metadata cannot be read "
            f"({type(error).__name__}), but it describes how the checkpoint is divided. It is "
            "damaged: load another one."
        ) from error


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value


def _segment(fields: Any) -> SavedSegment:
    dtype = getattr(torch, _of(str, fields["dtype"]))
    if not isinstance(dtype, torch.dtype):
        raise TypeError("no dtype")
    specs = [_spec(param, dtype) for param in _of(list, fields["params"])]
    return SavedSegment(plan_layout(specs), _boundary(fields["boundary"], specs))


def _spec(fields: Any, dtype: torch.dtype) -> ParamSpec:
    name, *aliases = (_of(str, each) for each in _of(list, fields["names"]))
    shape, stride = (
        tuple(_of(int, size) for size in _of(list, fields[each])) for each in ("shape", "stride")
    )
    if len(shape) != len(stride) or any(size < 0 for size in shape + stride):
        raise ValueError("no shape and stride of a tensor")
    return ParamSpec(name, shape, dtype, stride, aliases=tuple(aliases))
