"""The CUDA caching allocator: reserved memory, and the modules that keep it fragmented.

Note [Fragmentation]
The allocator gets segments from the device and divides them into blocks. A segment with one block
in use stays reserved; its free blocks serve only tensors that fit into them. So memory can run out
although much of it is free. To release such a segment, move or free the tensors in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._holders import Held
from ._rows import bytes_shown

SHOWN = 8
"""Segments that a page shows."""


@dataclass(frozen=True)
class Segment:
    """A segment that is partly in use.

    Attributes:
        reserved: bytes of the segment.
        free: bytes of its free blocks.
        largest: bytes of its largest free block.
        holders: bytes in use by module; "" if the module is unknown or there is none.
    """

    reserved: int
    free: int
    largest: int
    holders: dict[str, int]


@dataclass(frozen=True)
class Allocator:
    """The allocator of one device.

    Attributes:
        device: such as "cuda:0".
        reserved: bytes of all segments.
        in_use: bytes of all blocks in use.
        cached: bytes of segments without a block in use. The allocator returns them to the device
            when memory is short, or by `torch.cuda.empty_cache()`.
        segments: segments that are partly in use, the one with the most free bytes first.
    """

    device: str
    reserved: int
    in_use: int
    cached: int
    segments: tuple[Segment, ...]

    @property
    def fragmented(self) -> int:
        """Free bytes in segments that are partly in use."""
        return sum(segment.free for segment in self.segments)

    def by_module(self) -> dict[str, int]:
        """Return, for each module, the free bytes of the segments in which it holds a block.

        Several modules may hold the same segment, so the sum may be more than `fragmented`.
        """
        found: Counter[str] = Counter()
        for segment in self.segments:
            found.update(dict.fromkeys(segment.holders, segment.free))
        return dict(found.most_common())

    def lines(self) -> list[str]:
        """Return the text lines of this allocator for a page."""
        lines = [
            "",
            f"allocator of {self.device}: {bytes_shown(self.reserved)} reserved, "
            f"{bytes_shown(self.in_use)} in use, {bytes_shown(self.cached)} cached, "
            f"{bytes_shown(self.fragmented)} fragmented",
        ]
        for segment in self.segments[:SHOWN]:
            held = ", ".join(
                f"{name or '(outside)'} {bytes_shown(size)}"
                for name, size in Counter(segment.holders).most_common(3)
            )
            lines.append(
                f"  {bytes_shown(segment.free):>10}  free of {bytes_shown(segment.reserved)}, at "
                f"most {bytes_shown(segment.largest)} at once; held by {held}"
            )
        return lines


def allocators(held: Iterable[Held]) -> tuple[Allocator, ...]:
    """Return the allocators of this process's CUDA devices; () if CUDA is missing or unused."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return ()
    return read_snapshot(torch.cuda.memory_snapshot(), held)


def read_snapshot(
    snapshot: Sequence[Mapping[str, Any]], held: Iterable[Held]
) -> tuple[Allocator, ...]:
    """Combine `torch.cuda.memory_snapshot()` with the modules that hold storages."""
    by_device: dict[str, list[Mapping[str, Any]]] = {}
    for segment in snapshot:
        by_device.setdefault(f"cuda:{segment['device']}", []).append(segment)
    owners = sorted((each.address, each.device, each.module) for each in held if each.address)
    return tuple(_allocator(device, by_device[device], owners) for device in sorted(by_device))


def _allocator(
    device: str, segments: Iterable[Mapping[str, Any]], owners: list[tuple[int, str, str]]
) -> Allocator:
    here = [(address, name) for address, place, name in owners if place == device]
    reserved = in_use = cached = 0
    partly: list[Segment] = []
    for segment in segments:
        used, free = _blocks(segment)
        reserved += segment["total_size"]
        in_use += sum(size for _, size in used)
        if not used:
            cached += segment["total_size"]
        elif free:
            holders: Counter[str] = Counter()
            for address, size in used:
                holders[_owner(here, address, address + size)] += size
            partly.append(Segment(segment["total_size"], sum(free), max(free), dict(holders)))
    partly.sort(key=lambda segment: -segment.free)
    return Allocator(device, reserved, in_use, cached, tuple(partly))


def _blocks(segment: Mapping[str, Any]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return address and size of the blocks in use, and the sizes of the free blocks."""
    used, free = [], []
    address = segment["address"]
    for block in segment["blocks"]:
        if block["state"] == "inactive":
            free.append(block["size"])
        else:
            used.append((address, block["size"]))
        address += block["size"]
    return used, free


def _owner(owners: list[tuple[int, str]], start: int, end: int) -> str:
    """Return the module of the storage that begins in a block; "" if none is known."""
    at = bisect_right(owners, (start, ""))
    at -= at > 0 and owners[at - 1][0] >= start
    return owners[at][1] if at < len(owners) and owners[at][0] < end else ""
