"""Pure: how a sharded checkpoint was cut, so that it can be cut anew without the model.

It is stored as JSON beside each rank's data; values are in the checkpoint itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from ._errors import CheckpointError
from ._layout import FlatLayout, plan_layout
from ._shard import Boundary
from ._spec import ParamSpec

FILE_NAME = "layout.json"


@dataclass(frozen=True)
class SavedSegment:
    """One segment of a unit, with qualified parameter names.

    Args:
        layout: where the parameters lie.
        boundary: where shards may end.
    """

    layout: FlatLayout
    boundary: Boundary


def encode(segments: Iterable[SavedSegment]) -> str:
    """Segments as JSON.

    Example:
        >>> layout = plan_layout([ParamSpec("w", (3, 2), torch.float32)])
        >>> decode(encode([SavedSegment(layout, "row")]))[0].boundary
        'row'
    """
    return json.dumps([_segment_fields(segment) for segment in segments])


def _segment_fields(segment: SavedSegment) -> dict[str, object]:
    return {
        "dtype": str(segment.layout.dtype).removeprefix("torch."),
        "boundary": segment.boundary,
        "params": [
            {"names": spec.names, "shape": spec.shape, "stride": spec.stride}
            for spec in segment.layout.specs
        ],
    }


def decode(text: str) -> tuple[SavedSegment, ...]:
    """Segments from JSON.

    Raises:
        CheckpointError: the text is not what `encode` writes.
    """
    try:
        return tuple(_segment(fields) for fields in json.loads(text))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"flat_param.reshard_checkpoint: {FILE_NAME} cannot be read ({error!r}), but it says "
            "how the checkpoint was cut. Load the checkpoint into a module and save it again."
        ) from error


def _segment(fields: dict[str, object]) -> SavedSegment:
    dtype = getattr(torch, str(fields["dtype"]))
    params = cast("Sequence[dict[str, Sequence[int]]]", fields["params"])
    specs = [_spec(param, dtype) for param in params]
    return SavedSegment(plan_layout(specs), cast(Boundary, fields["boundary"]))


def _spec(fields: dict[str, Sequence[int]], dtype: torch.dtype) -> ParamSpec:
    name, *aliases = cast("Sequence[str]", fields["names"])
    shape, stride = tuple(fields["shape"]), tuple(fields["stride"])
    return ParamSpec(name, shape, dtype, stride, aliases=tuple(aliases))
