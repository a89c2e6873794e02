"""Regions whose values may be offloaded, and every way to do so."""

from __future__ import annotations

import itertools
import random

from sac_policies.budget import Trace, TracedOp, TracedPack
from sac_policies.budget._offloading import Copies


def traced(sizes: list[int], costs: list[int]) -> Trace:
    """Operators that make one value each, in nanoseconds."""
    rows = zip(sizes, costs, strict=True)
    ops = (TracedOp("aten.mm.default", n, size, cost, ()) for n, (size, cost) in enumerate(rows))
    packs = (TracedPack("aten.mm.default", n, 0, size) for n, size in enumerate(sizes))
    return Trace("ns", tuple(ops), tuple(packs))


def random_region(seed: int, most: int = 8) -> tuple[Trace, int, int, int]:
    """A trace, a rate at which some copies can be hidden, regions in a row, bytes that may stay.

    A third is as blocks are, of cheap and dear values of two sizes, whose copies take longer than
    they do.
    """
    r = random.Random(seed)
    n = r.randrange(1, most + 1)
    if seed % 3:
        sizes = [int(r.lognormvariate(10, 1)) + 1 for _ in range(n)]
        costs = [int(r.lognormvariate(8, 1)) + 1 for _ in range(n)]
    else:
        sizes = [r.choice((1000, 2700)) for _ in range(n)]
        costs = [int(r.choice((50, 500)) * r.uniform(0.9, 1.1)) for _ in range(n)]
    rate = max(1, int(sum(sizes) / sum(costs) * 1e9 * r.choice((0.1, 0.3, 1, 3))))
    room = r.choice((0, 0.2, 0.7)) * r.random()
    return traced(sizes, costs), rate, r.choice((1, 2, 32)), int(sum(sizes) * room)


def blocks(seed: int) -> Trace:
    """Eight blocks of eight values, of two sizes, some dear and some cheap."""
    r = random.Random(seed)
    sizes = [1000, 1000, 1000, 1000, 2700, 2700, 2700, 1000] * 8
    costs = [30, 300, 300, 300, 900, 90, 100, 900] * 8
    return traced(sizes, [int(cost * r.uniform(0.9, 1.1)) for cost in costs])


def spread(seed: int) -> Trace:
    """Sixty-four values whose sizes and costs are spread."""
    r = random.Random(seed)
    rows = [
        (int(r.lognormvariate(10, 1.5)) + 1, int(r.lognormvariate(8, 1.5)) + 1) for _ in range(64)
    ]
    return traced([size for size, _ in rows], [cost for _, cost in rows])


def least_cost(trace: Trace, copies: Copies, capacity: int) -> int:
    """Of all ways to keep, offload and repeat: nanoseconds of all regions together."""
    items = trace.items()
    found = []
    for ways in itertools.product("kor", repeat=len(items)):
        of = {way: [i for i, w in zip(items, ways, strict=True) if w == way] for way in "kor"}
        if sum(item.kept_bytes for item in of["k"]) <= capacity:
            away = sorted(op for item in of["o"] for op in item.ops)
            repeated = copies.regions * sum(item.cost for item in of["r"])
            found.append(repeated + copies.waits(away))
    return min(found)
