"""Allocator segments: reserved and fragmented memory, and the modules that hold it."""

from __future__ import annotations

from mod_tracker.reports._allocator import read_snapshot
from mod_tracker.reports._holders import Held
from mod_tracker.reports._memory_page import MemoryPage

MIB = 1 << 20


def segment(address, *blocks, device=0):
    """Return a segment like those of `torch.cuda.memory_snapshot()`; a block is (size, in use)."""
    made, at = [], address
    for size, used in blocks:
        state = "active_allocated" if used else "inactive"
        made.append({"address": at, "size": size, "requested_size": size, "state": state})
        at += size
    return {
        "device": device,
        "address": address,
        "total_size": sum(size for size, _ in blocks),
        "allocated_size": sum(size for size, used in blocks if used),
        "segment_type": "large",
        "is_expandable": False,
        "blocks": made,
    }


def held(address, size, module, device="cuda:0"):
    """Return a live storage of a module."""
    return Held(
        size,
        *("saved", module, (module,), "forward", "a.py:1", (size,), "uint8"),
        device=device,
        address=address,
    )


SNAPSHOT = [
    segment(0x1000_0000, (2 * MIB, True), (18 * MIB, False)),  # one small tensor pins 18 MiB
    segment(0x2000_0000, (20 * MIB, False)),  # no block in use: may be returned to the device
    segment(0x3000_0000, (5 * MIB, True), (3 * MIB, False), (12 * MIB, True)),
    segment(0x4000_0000, (20 * MIB, True)),
    segment(0x1000_0000, (MIB, True), (MIB, False), device=1),
]
HELD = [
    held(0x1000_0000, 2 * MIB - 100, "Net.cache"),
    held(0x3000_0000, 5 * MIB, "Net.layers.0"),
    held(0x3000_0000 + 8 * MIB + 512, 12 * MIB - 600, "Net.layers.1"),
    held(0x1000_0000, MIB, "Net.other", device="cuda:1"),
    held(0, 7, "Net.fake"),
]


def test_bytes_of_each_device_add_up():
    first, second = read_snapshot(SNAPSHOT, HELD)
    assert (first.device, second.device) == ("cuda:0", "cuda:1")
    assert first.reserved == 80 * MIB
    assert first.in_use == 39 * MIB
    assert first.cached == 20 * MIB
    assert first.fragmented == 21 * MIB
    assert first.reserved == first.in_use + first.cached + first.fragmented


def test_modules_that_hold_a_segment_are_named():
    """The segment with the most free bytes comes first; a storage may begin inside a block."""
    first, _ = read_snapshot(SNAPSHOT, HELD)
    assert [(part.free, part.holders) for part in first.segments] == [
        (18 * MIB, {"Net.cache": 2 * MIB}),
        (3 * MIB, {"Net.layers.0": 5 * MIB, "Net.layers.1": 12 * MIB}),
    ]
    assert first.by_module() == {
        "Net.cache": 18 * MIB,
        "Net.layers.0": 3 * MIB,
        "Net.layers.1": 3 * MIB,
    }


def test_block_without_a_known_holder_is_outside():
    """Such as the workspace of a library."""
    (only,) = read_snapshot(SNAPSHOT[:1], [])
    assert only.segments[0].holders == {"": 2 * MIB}


def test_page_has_the_allocator():
    page = MemoryPage("asked", HELD, {}, 3, allocators=read_snapshot(SNAPSHOT, HELD))
    lines = str(page).splitlines()
    at = lines.index(
        "allocator of cuda:0: 83.9 MB reserved, 40.9 MB in use, 21 MB cached, 22 MB fragmented"
    )
    assert lines[at + 1].split(maxsplit=2) == [
        *("18.9", "MB"),
        "free of 21 MB, at most 18.9 MB at once; held by Net.cache 2.1 MB",
    ]
