"""Divide plain `nn.Sequential` modules into segments of consecutive children.

A single layer gains nothing as a region: its input, which the region keeps, is most of what the
layer saves. A segment of several layers keeps one input. Segments are chosen as one partition, with
the lowest peak that their measured sizes predict: inputs of the segments so far, and all that the
current segment saves. Sequentials inside Sequentials are divided too, where that is better.

Modules, their names and the state dict stay as they are: only `forward` of a divided Sequential is
replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import attrgetter
from typing import Any, NamedTuple

from torch import nn

from .._tensors import tensors_in
from .._torch_compat._module_calls import around_calls, is_compiled
from ._agree import largest_each
from ._checkpointed import ReplacedForward
from ._intervals import largest_pass, marked
from ._measure import Interval, Marks, storage_bytes
from ._step import Step

_LEAST_GAIN = 0.03
"""Part of the predicted peak that a division must save to be tried."""
_PRECISION = 256
"""The predicted peak is the lowest one within one part in so many."""

Regions = tuple[tuple[str, nn.Module], ...]


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


def divide(model: nn.Module, regions: Regions, step: Step) -> Division | None:
    """Divide the Sequentials of a model by their measured sizes. Collective.

    Args:
        model: the model.
        regions: its regions so far: a Sequential among them is divided, others stay whole.
        step: runs the model.

    Returns:
        The division, or None if none promises a lower peak.
    """
    tree = _Tree(model, regions)
    if not tree.nodes:
        return None
    sizes = _measured(model, tree, step)
    now = sizes.peak([tree.below(path) for path, _ in regions])
    runs = _best(tree.runs(sizes.ran), sizes)
    if sizes.peak([(run.start, run.stop) for run in runs]) > (1 - _LEAST_GAIN) * now:
        return None
    return tree.division(runs, sizes.ran)


def is_divisible(module: nn.Module) -> bool:
    """Whether a module is a Sequential with torch's forward, which Python calls.

    Example:
        >>> is_divisible(nn.Sequential(nn.ReLU())), is_divisible(nn.ReLU())
        (True, False)
    """
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and type(module).__iter__ is nn.Sequential.__iter__
        and "forward" not in vars(module)
        and not is_compiled(module)
    )


@dataclass(frozen=True)
class _Node:
    """A Sequential.

    Attributes:
        path: of the module.
        module: the Sequential.
        starts: number of the first leaf below each child, and of the leaf after the last.
    """

    path: str
    module: nn.Sequential
    starts: list[int]

    def path_of(self, first: int, last: int) -> str:
        """Return the path of the children from `first` to before `last`: "features.4-7"."""
        names = list(self.module._modules)[first:last]
        return _below(self.path, names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}")


class _Run(NamedTuple):
    """Leaves that may be one region: consecutive children of a node.

    Attributes:
        start: number of the first leaf.
        stop: number after the last leaf.
        node: number of the node; -1 for a leaf outside of nodes.
        first: position of the first child.
        last: position after the last child.
    """

    start: int
    stop: int
    node: int = -1
    first: int = 0
    last: int = 0


class _Tree:
    """The Sequentials of a model, and the modules that are not divided further.

    Attributes:
        nodes: the Sequentials, inner ones before outer ones.
        leaves: paths and modules, in order.
    """

    def __init__(self, model: nn.Module, regions: Regions) -> None:
        self.nodes: list[_Node] = []
        self.leaves: list[tuple[str, nn.Module]] = []
        self._regions = {path for path, _ in regions if path}
        self._around = {
            ".".join(path.split(".")[:count])
            for path in self._regions
            for count in range(path.count(".") + 1)
        }
        self._whole: set[int] = set()
        """Leaves that no segment with other leaves may contain."""
        self._add("", model, in_node=False)

    def _add(self, path: str, module: nn.Module, *, in_node: bool) -> None:
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        known = any(node.module is module for node in self.nodes)
        if is_divisible(module) and children and not known:
            assert isinstance(module, nn.Sequential), "only those are divisible"
            starts = []
            for name, child in children:
                starts.append(len(self.leaves))
                self._add(_below(path, name), child, in_node=True)
            self.nodes.append(_Node(path, module, [*starts, len(self.leaves)]))
        elif path in self._regions:
            self._whole.add(len(self.leaves))
            self.leaves.append((path, module))
        elif in_node and path not in self._around:
            self.leaves.append((path, module))
        elif not (is_compiled(module) or known):
            first = len(self.leaves)
            for name, child in children:
                self._add(_below(path, name), child, in_node=False)
            self._whole.update(range(first, len(self.leaves)) if in_node else ())

    def below(self, path: str) -> tuple[int, int]:
        """Return the number of the first leaf at or below a path, and that after the last."""
        found = [
            number
            for number, (leaf, _) in enumerate(self.leaves)
            if not path or f"{leaf}.".startswith(f"{path}.")
        ]
        return (found[0], found[-1] + 1) if found else (0, 0)

    def runs(self, ran: Set[int]) -> list[_Run]:
        """List the possible regions, by their last leaf.

        Args:
            ran: the leaves that a step runs.
        """
        found = {(at, at + 1): _Run(at, at + 1) for at in range(len(self.leaves))}
        alone = self._whole | set(range(len(self.leaves))) - ran
        for number, node in enumerate(self.nodes):
            for first, start in enumerate(node.starts[:-1]):
                for last in range(first + 1, len(node.starts)):
                    stop = node.starts[last]
                    is_alone = not alone.isdisjoint(range(node.starts[last - 1], stop))
                    if is_alone and stop > start + 1:
                        break
                    if stop > start:
                        found[start, stop] = _Run(start, stop, number, first, last)
                    if is_alone:
                        break
        return sorted(found.values(), key=attrgetter("stop", "start"))

    def leaf_by_leaf(self) -> Division:
        """Return the division in which each leaf is a region."""
        every = set(range(len(self.leaves)))
        return self.division([run for run in self.runs(set()) if run.stop == run.start + 1], every)

    def division(self, runs: Sequence[_Run], ran: Set[int]) -> Division:
        """Return the regions for runs, without segments of leaves that a step does not run."""
        cut = [run for run in runs if run.node >= 0 and run.start not in self._whole]
        cuts = {run.node: {0} for run in cut}
        for run in cut:
            cuts[run.node].update((run.first, run.last))
        divided = {
            number: Divided(node.module, sorted(own - {len(node.starts) - 1}))
            for number, own in cuts.items()
            for node in (self.nodes[number],)
        }
        regions = []
        for run in runs:
            if run.start in self._whole:
                regions.append(self.leaves[run.start])
            elif run.node >= 0 and run.start in ran:
                path = self.nodes[run.node].path_of(run.first, run.last)
                regions.append((path, divided[run.node].at(run.first)))
        return Division(tuple(regions), tuple(divided.values()))


class _Sizes:
    """Bytes of leaves in a step without checkpointing.

    Attributes:
        inputs: bytes of each leaf's inputs.
        ran: the leaves that ran.

    Args:
        inputs: bytes of each leaf's inputs.
        intervals: of a step in which leaves are marked by number.
    """

    def __init__(self, inputs: Sequence[int], intervals: Sequence[Interval]) -> None:
        self.inputs, count = inputs, len(inputs)
        largest = largest_pass(intervals)
        start = intervals.index(largest[0])
        now = [*accumulate((each.grown for each in intervals), initial=0)][start:]
        ends = [at for at, (_, is_after, _) in _of_leaves(largest) if is_after is None]
        tail = max(ends, default=0)
        called, left, reached = ([0] * count for _ in range(3))
        for at, (number, is_backward, each) in _of_leaves(largest):
            if is_backward:
                reached[number] = max(reached[number], now[at] - now[0] + each.most)
            else:
                left[number] += each.grown if at < tail else 0
                called[number] += 0 if is_backward is None else each.grown
        self.ran = {number for _, (number, *_) in _of_leaves(largest[:tail])}
        self._called = called
        """By leaf, bytes in use after its call over those before it."""
        self._until = [0, *accumulate(left)]
        """By leaf, bytes in use before its call; then those after the last leaf."""
        reached = list(map(max, reached, self._until[1:]))
        self._reached = [list(accumulate(reached[at:], max)) for at in range(count)]
        """By leaf, the peak of its backward, and of that of each number of leaves from it."""
        self._loss = now[tail] - now[0] + largest[tail].most - self._until[-1]

    def peak_within(self, start: int, stop: int) -> int:
        """Return the peak of recomputing leaves in backward, over the bytes before them."""
        return self._called[start] - self._until[start + 1] + self._reached[start][stop - start - 1]

    def peak(self, runs: Sequence[tuple[int, int]]) -> int:
        """Return the peak if runs are recomputed, and other leaves keep what they save."""
        held = top = at = 0
        count = len(self.inputs)
        for start, stop in sorted((*runs, (count, count))):
            for leaf in range(at, start):
                top = max(top, held - self._until[leaf] + self._reached[leaf][0])
                held += self._until[leaf + 1] - self._until[leaf]
            if stop > start:
                held += self.inputs[start]
                top, at = max(top, held + self.peak_within(start, stop)), stop
        return self.with_loss(held, top)

    def with_loss(self, held: int, top: int) -> int:
        """Return the peak of a step that holds some bytes at the end of forward."""
        return max(top, held + self._loss)


def _of_leaves(intervals: Sequence[Interval]) -> Iterator[tuple[int, tuple[int, Any, Interval]]]:
    """Yield positions, numbers of leaves, whether in backward (None: after it), and intervals."""
    for at, each in enumerate(intervals):
        if isinstance(each.key, tuple):
            yield at, (each.key[0], each.key[2], each)


def _measured(model: nn.Module, tree: _Tree, step: Step) -> _Sizes:
    """Measure a step in which each leaf is marked. Collective."""
    division = tree.leaf_by_leaf()
    inputs = [0] * len(tree.leaves)

    def note(number: int, _: object, args: Any, kwargs: Any) -> None:
        size = storage_bytes(tensors_in((args, kwargs)), device=step.device)
        inputs[number] = max(inputs[number], size)

    division.put()
    modules, marks = [module for _, module in division.regions], Marks(step.device)
    try:
        with around_calls(modules, note), marked(modules, marks):
            found = step.intervals(marks)
    finally:
        division.undo()
    return _Sizes(largest_each(inputs), found)


def _best(runs: Sequence[_Run], sizes: _Sizes) -> list[_Run]:
    """Return the partition into runs with the lowest peak; of equal ones, that which holds less."""
    best = [run for run in runs if run.stop == run.start + 1]
    low, high = 0, sizes.peak([(run.start, run.stop) for run in best])
    while high - low > 1 + high // _PRECISION:
        middle = (low + high) // 2
        found = _within(runs, sizes, middle)
        if found:
            best, high = found, middle
        else:
            low = middle
    return best


def _within(runs: Sequence[_Run], sizes: _Sizes, limit: int) -> list[_Run]:
    """Return the partition with a peak of at most `limit` that holds least; [] without one."""
    held: dict[int, int] = {0: 0}
    last: dict[int, _Run] = {}
    for run in runs:
        if run.start in held:
            now = held[run.start] + sizes.inputs[run.start]
            fits = now + sizes.peak_within(run.start, run.stop) <= limit
            if fits and (run.stop not in held or now < held[run.stop]):
                held[run.stop], last[run.stop] = now, run
    found, at = list[_Run](), len(sizes.inputs)
    if at not in held or sizes.with_loss(held[at], 0) > limit:
        return []
    while at:
        found.append(last[at])
        at = found[-1].start
    return found[::-1]


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
