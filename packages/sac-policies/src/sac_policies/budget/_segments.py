"""Divide plain `nn.Sequential` modules into segments of consecutive children.

A single layer gains nothing as a region: its input, which the region keeps, is most of what the
layer saves. A segment of several layers keeps one input. Segments are chosen as one partition, with
the lowest peak that their measured sizes predict: inputs of the segments so far, and all that the
current segment saves. Of Sequentials inside each other, the one with most children is divided.

Modules, their names and the state dict stay as they are: only `forward` of a divided Sequential is
replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, NamedTuple, TypeGuard

from torch import nn

from .._tensors import tensors_in
from .._torch_compat._module_calls import around_calls, is_compiled
from ._agree import check_equal, largest_each
from ._checkpointed import ReplacedForward
from ._intervals import largest_pass, marked
from ._measure import Interval, Marks, bytes_of, tail_of
from ._repeating import Calls
from ._step import Step

_LEAST_GAIN = 0.03
"""Part of the predicted peak that a division must save to be tried."""
_PRECISION = 256
"""The predicted peak is the lowest one within one part in so many."""

Regions = tuple[tuple[str, nn.Module], ...]
Run = tuple[int, int]
"""Number of the first leaf of a region, and the number after the last."""


class Segment(nn.Module):
    """Consecutive children of an `nn.Sequential`; no module of the model contains it.

    Attributes:
        start: position of the first child.

    Args:
        whole: the Sequential. Its children are read at each call, so they may be replaced.
        start: position of the first child.
        stop: position after the last child; None for all that follow.
    """

    def __init__(self, whole: nn.Sequential, start: int, stop: int | None) -> None:
        super().__init__()
        self._whole, self.start, self._stop = (whole,), start, stop  # not a child
        self._modules.update(islice(whole._modules.items(), start, stop))

    def forward(self, input: Any) -> Any:
        """Call the children one after another."""
        for child in list(self._whole[0])[self.start : self._stop]:
            input = child(input)
        return input


class Divided(ReplacedForward):
    """The `forward` of a Sequential, which calls segments.

    Segments are not called as modules, so that global module hooks see the model's modules only.

    Args:
        module: a plain Sequential.
        cuts: positions of the first child of each segment.
    """

    module: nn.Sequential

    def __init__(self, module: nn.Sequential, cuts: Sequence[int]) -> None:
        super().__init__(module)
        self.segments = [
            Segment(module, *each) for each in zip(cuts, (*cuts[1:], None), strict=True)
        ]

    def at(self, first: int) -> Segment:
        """Return the segment that begins with a child."""
        return next(each for each in self.segments if each.start == first)

    def __call__(self, input: Any) -> Any:
        """Run the segments, or the plain forward after `undo`."""
        if self.is_undone:
            return self.forward(input)
        for segment in self.segments:
            input = segment.forward(input)
        return input


@dataclass(frozen=True)
class Division:
    """Regions of a model.

    Attributes:
        regions: modules and segments, by path.
        divided: forwards to be replaced while the regions are in use.
    """

    regions: Regions
    divided: tuple[Divided, ...] = ()

    def put(self) -> None:
        """Replace the forwards."""
        for each in self.divided:
            each.put()

    def undo(self) -> None:
        """Restore the forwards."""
        for each in self.divided:
            each.undo()


def divide(model: nn.Module, regions: Regions, step: Step, calls: Calls) -> Division | None:
    """Divide the Sequentials of a model by their measured sizes. Collective.

    Args:
        model: the model.
        regions: its regions so far: a Sequential among them is divided, others stay whole.
        step: runs the model.
        calls: modules that a step calls.

    Returns:
        The division, or None if none promises a lower peak.
    """
    found = _leaves("", model, {path for path, _ in regions if path}, calls)
    leaves = list({(each.whole, each.module, each.at): each for each in found}.values())  # shared
    check_equal(repr([each.path for each in leaves]), what="layer")
    if all(each.whole is None for each in leaves):
        return None
    sizes = _measured(leaves, step)
    now = sizes.peak([_below(leaves, path) for path, _ in regions])
    runs = _best(leaves, sizes)
    if sizes.peak(runs) > (1 - _LEAST_GAIN) * now:
        return None
    return _division(leaves, runs)


def _is_divisible(module: nn.Module, calls: Calls) -> TypeGuard[nn.Sequential]:
    """Whether a module is a Sequential with torch's forward, of which a step calls all children."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and type(module).__iter__ is nn.Sequential.__iter__
        and "forward" not in vars(module)
        and not is_compiled(module)
        and len(module) > 0
        and all(calls.times[each] for each in (module, *module))
    )


class _Leaf(NamedTuple):
    """A module that is not divided further.

    Attributes:
        path: of the module.
        module: the module.
        whole: the divided Sequential that it is a child of; None for a region outside of those.
        at: its position there.
    """

    path: str
    module: nn.Module
    whole: nn.Sequential | None = None
    at: int = 0


def _leaves(path: str, module: nn.Module, regions: set[str], calls: Calls) -> Iterator[_Leaf]:
    """Yield the children of Sequentials to be divided, and the other regions, in order."""
    inside = {_path(path, below): each for below, each in module.named_modules() if below}
    lengths = {at: len(each) for at, each in inside.items() if _is_divisible(each, calls)}
    is_free = regions.isdisjoint(inside.keys() - lengths.keys())
    if _is_divisible(module, calls) and is_free and len(module) >= max(lengths.values(), default=0):
        for at, (name, child) in enumerate(zip(module._modules, module, strict=True)):
            yield _Leaf(_path(path, name), child, module, at)
    elif path in regions:
        yield _Leaf(path, module)
    elif not is_compiled(module):
        for name, child in module.named_children():
            yield from _leaves(_path(path, name), child, regions, calls)


def _below(leaves: Sequence[_Leaf], path: str) -> Run:
    """Return the leaves at or below a path."""
    found = [
        at for at, each in enumerate(leaves) if not path or f"{each.path}.".startswith(f"{path}.")
    ]
    return (found[0], found[-1] + 1) if found else (0, 0)


def _division(leaves: Sequence[_Leaf], runs: Sequence[Run]) -> Division:
    """Return the regions for runs that contain all leaves."""
    cuts: dict[nn.Sequential, list[int]] = {}
    for start, _ in runs:
        first = leaves[start]
        if first.whole is not None:
            cuts.setdefault(first.whole, []).append(first.at)
    divided = {whole: Divided(whole, own) for whole, own in cuts.items()}
    regions: list[tuple[str, nn.Module]] = []
    for start, stop in runs:
        first, last = leaves[start], leaves[stop - 1]
        path = first.path if stop == start + 1 else f"{first.path}-{last.path.rpartition('.')[2]}"
        module = first.module if first.whole is None else divided[first.whole].at(first.at)
        regions.append((path, module))
    return Division(tuple(regions), tuple(divided.values()))


class _Sizes:
    """Bytes of leaves in a step without checkpointing.

    Args:
        inputs: bytes of each leaf's inputs.
        intervals: of the largest pass of a step in which leaves are marked by number.
        before: bytes in use before each interval.
    """

    def __init__(
        self, inputs: Sequence[int], intervals: Sequence[Interval], before: Sequence[int]
    ) -> None:
        self.inputs, count = inputs, len(inputs)
        keys = [each.key for each in intervals]
        tail = keys.index(tail_of(keys))
        called, left, reached = ([0] * count for _ in range(3))
        for at, each in enumerate(intervals):
            if each.region is None:
                continue
            if each.key[2]:
                reached[each.region] = max(reached[each.region], before[at] + each.most)
            else:
                left[each.region] += each.grown if at < tail else 0
                called[each.region] += 0 if each.key[2] is None else each.grown
        self._called = called
        """By leaf, bytes in use after its call over those before it."""
        self._until = [0, *accumulate(left)]
        """By leaf, bytes in use before its call; then those after the last leaf."""
        self._reached = list(map(max, reached, self._until[1:]))
        """By leaf, the peak of its backward."""
        self._loss = before[tail] + intervals[tail].most - self._until[-1]

    def peak_within(self, start: int, stop: int) -> int:
        """Return the peak of recomputing leaves in backward, over the bytes before them."""
        return self._called[start] - self._until[start + 1] + max(self._reached[start:stop])

    def peak(self, runs: Sequence[Run]) -> int:
        """Return the peak if runs are recomputed, and other leaves keep what they save."""
        held = top = at = 0
        count = len(self.inputs)
        for start, stop in sorted((*runs, (count, count))):
            for leaf in range(at, start):
                top = max(top, held - self._until[leaf] + self._reached[leaf])
                held += self._until[leaf + 1] - self._until[leaf]
            if stop > start:
                held += self.inputs[start]
                top, at = max(top, held + self.peak_within(start, stop)), stop
        return self.with_loss(held, top)

    def with_loss(self, held: int, top: int) -> int:
        """Return the peak of a step that holds some bytes at the end of forward."""
        return max(top, held + self._loss)


def _measured(leaves: Sequence[_Leaf], step: Step) -> _Sizes:
    """Measure a step in which each leaf is marked. Collective."""
    division = _division(leaves, [(at, at + 1) for at in range(len(leaves))])
    inputs = [0] * len(leaves)

    def note(number: int, _: object, args: Any, kwargs: Any) -> None:
        size = bytes_of(tensors_in((args, kwargs)), device=step.device)
        inputs[number] = max(inputs[number], size)

    division.put()
    modules, marks = [module for _, module in division.regions], Marks(step.device)
    try:
        with around_calls(modules, note), marked(modules, marks):
            found = step.intervals(marks)
    finally:
        division.undo()
    largest = largest_pass(found)
    now = [*accumulate((each.grown for each in found), initial=0)][found.index(largest[0]) :]
    return _Sizes(largest_each(inputs), largest, [each - now[0] for each in now])


def _best(leaves: Sequence[_Leaf], sizes: _Sizes) -> list[Run]:
    """Return the partition with the lowest peak, and among equal peaks the smallest inputs."""
    count = len(leaves)
    best = [(at, at + 1) for at in range(count)]
    low, high = 0, sizes.peak(best)
    while high - low > 1 + high // _PRECISION:
        middle = (low + high) // 2
        found = _within(leaves, sizes, middle)
        if found:
            best, high = found, middle
        else:
            low = middle
    return best


def _within(leaves: Sequence[_Leaf], sizes: _Sizes, limit: int) -> list[Run]:
    """Return the partition with a peak of at most `limit` that holds least; [] without one."""
    held: dict[int, int] = {0: 0}
    last: dict[int, Run] = {}
    for start, first in enumerate(leaves):
        if start not in held:
            continue
        now = held[start] + sizes.inputs[start]
        for stop in range(start + 1, len(leaves) + 1):
            is_one = stop == start + 1 or leaves[stop - 1].whole is first.whole is not None
            if not is_one or now + sizes.peak_within(start, stop) > limit:
                break
            if stop not in held or now < held[stop]:
                held[stop], last[stop] = now, (start, stop)
    found, at = list[Run](), len(leaves)
    if at not in held or sizes.with_loss(held[at], 0) > limit:
        return []
    while at:
        found.append(last[at])
        at = found[-1][0]
    return found[::-1]


def _path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
