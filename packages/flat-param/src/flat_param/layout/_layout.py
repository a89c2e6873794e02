"""Where each parameter lies in a flat buffer.

Parameters lie in the order of their specs, each at an aligned offset. Gaps between them and at the
end are always zero. The same specs give the same layout on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from .._errors import LayoutError
from ._spec import ParamSpec

DEFAULT_ALIGN_BYTES = 16


@dataclass(frozen=True)
class FlatLayout:
    """Offsets of parameters in one flat buffer.

    Args:
        specs: the parameters, in buffer order; all of one dtype.
        offsets: first element of each parameter.
        numel: elements of the buffer, gaps included.
        align_numel: every offset is a multiple of it.
    """

    specs: tuple[ParamSpec, ...]
    offsets: tuple[int, ...]
    numel: int
    align_numel: int = 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the buffer."""
        return self.specs[0].dtype

    @property
    def used_numel(self) -> int:
        """Elements that belong to a parameter."""
        return sum(spec.numel for spec in self.specs)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, gaps included."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """`(start, stop)` of each parameter in the buffer, elements."""
        pairs = zip(self.specs, self.offsets, strict=True)
        return tuple((offset, offset + spec.numel) for spec, offset in pairs)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """`(start, stop)` of every range that belongs to no parameter."""
        stops = (0, *(stop for _, stop in self.ranges))
        starts = (*self.offsets, self.numel)
        return tuple((a, b) for a, b in zip(stops, starts, strict=True) if a < b)

    @cached_property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """`(numel, index)` of every range in buffer order; a gap has index -1."""
        found = [(*place, index) for index, place in enumerate(self.ranges)]
        found += [(*gap, -1) for gap in self.gaps]
        return tuple((stop - start, index) for start, stop, index in sorted(found))


@dataclass(frozen=True)
class Segment:
    """The part of a unit with one dtype and one trainability.

    Args:
        name: dtype, with `.frozen` if its parameters are frozen: `bfloat16.frozen`.
        trainable: whether its parameters require gradients.
        layout: places of the parameters.
    """

    name: str
    trainable: bool
    layout: FlatLayout


def plan_layout(
    specs: Sequence[ParamSpec],
    *,
    align_bytes: int = DEFAULT_ALIGN_BYTES,
    multiple: int | None = None,
) -> FlatLayout:
    """Place parameters one after another in a flat buffer.

    Pure: the same input gives the same layout on every rank. O(n).

    Args:
        specs: in buffer order; non-empty; one dtype.
        align_bytes: alignment of each parameter in bytes; a power of two; with 1 there are no gaps.
        multiple: the buffer's numel is rounded up to it, elements; default: the alignment.

    Returns:
        Layout with `numel` (elements, gaps included) and offsets (elements).

    Raises:
        LayoutError: empty input, mixed dtype, or `align_bytes` not a power of two.

    Example:
        >>> plan_layout([ParamSpec("w", (3, 2), torch.float32)], align_bytes=16).numel
        8
    """
    if not specs:
        raise LayoutError(
            "flat_param.plan_layout: specs is empty, but a layout needs a parameter. "
            "Skip modules without parameters."
        )
    for spec in specs:
        if spec.dtype != specs[0].dtype:
            raise LayoutError(
                f"flat_param.plan_layout: '{spec.name}' is {spec.dtype} and '{specs[0].name}' "
                f"{specs[0].dtype}, but one buffer has one dtype. Use plan_segments."
            )
    is_power = type(align_bytes) is int and align_bytes > 0 and align_bytes.bit_count() == 1
    if not is_power:
        raise LayoutError(
            f"flat_param.plan_layout: align_bytes is {align_bytes!r}, but it must be a power of "
            "two. Use 16, or 1 for no gaps."
        )
    align_numel = max(1, align_bytes // specs[0].dtype.itemsize)
    offsets: list[int] = []
    end = 0
    for spec in specs:
        start = round_up(end, align_numel)
        offsets.append(start)
        end = start + spec.numel
    numel = round_up(end, align_numel if multiple is None else multiple)
    return FlatLayout(tuple(specs), tuple(offsets), numel, align_numel)


def plan_segments(
    specs: Sequence[ParamSpec], *, align_bytes: int = DEFAULT_ALIGN_BYTES
) -> tuple[Segment, ...]:
    """Group parameters by dtype and trainability; place each group.

    Pure. O(n). Segments come in the order of their first parameter.

    Args:
        specs: in buffer order.
        align_bytes: as in `plan_layout`.

    Raises:
        LayoutError: `align_bytes` is not a power of two.

    Example:
        >>> head = ParamSpec("head", (4,), torch.float32)
        >>> body = ParamSpec("body", (4,), torch.bfloat16, requires_grad=False)
        >>> [segment.name for segment in plan_segments([head, body])]
        ['float32', 'bfloat16.frozen']
    """
    groups: dict[tuple[torch.dtype, bool], list[ParamSpec]] = {}
    for spec in specs:
        groups.setdefault((spec.dtype, spec.requires_grad), []).append(spec)
    segments = []
    for (dtype, trainable), group in groups.items():
        name = str(dtype).removeprefix("torch.") + ("" if trainable else ".frozen")
        segments.append(Segment(name, trainable, plan_layout(group, align_bytes=align_bytes)))
    return tuple(segments)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple at or above the value."""
    return -(-value // multiple) * multiple
