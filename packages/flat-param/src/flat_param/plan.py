"""What sharded training will need, from shapes alone.

Legend: `shard` is one rank's part of a unit; `whole` is a unit's buffer of all parts; W is the
number of ranks that share one copy, R the number of copies.

Rule 1: what a rank keeps all the time: shards, their gradients, the optimizer's state.
Rule 2: what it holds for a while: the whole parameters of the outermost unit and of the two largest
        others (one computes, one is gathered ahead), or all without `reshard_after_forward`; and
        whole gradients of the outermost and the two largest (one fills, one is summed).
Rule 3: a gather or a sum sends (W - 1) shards from each rank, a sum over copies
        2 * (R - 1) / R of a shard: what a bandwidth-optimal algorithm sends.
Rule 4: of several microbatches, all but the last run inside `no_sync`: each gathers what the last
        one frees, and whole gradients of all units are kept until the last one sums them.
Rule 5: of state elsewhere, two buckets are on the device: which parameters lie in one depends on
        the optimizer, so the bytes are the most that two can have.
Rule 6: ranks are counted, not walked: a plan of 16,384 costs what one of 16 does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from ._errors import LayoutError
from ._offload_optimizer import aligned_nbytes
from .comm._comm import CommCount
from .comm._trail import ORDER_BYTES
from .layout._boundary import Boundary, boundaries_of, check_boundary
from .layout._boundary_rules import BoundaryRules, resolve
from .layout._layout import FlatLayout, Segment, plan_layout, plan_segments
from .layout._options import Precision, precision_of
from .layout._shard import (
    ShardPart,
    ShardPlan,
    boundary_in,
    check_ranks,
    cut_places,
    even_numel,
    parts_between,
    plan_shard,
)
from .layout._spec import ParamSpec, collect_params

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


__all__ = [
    "CommCount",
    "FlatLayout",
    "ParamSpec",
    "RankBytes",
    "Segment",
    "ShardPart",
    "ShardPlan",
    "StateElsewhere",
    "TrainingPlan",
    "UnitShape",
    "collect_params",
    "parts_between",
    "plan_layout",
    "plan_segments",
    "plan_shard",
    "plan_training",
    "unit_shapes",
]

Counts = dict[str, CommCount]
"""Calls and bytes sent, by kind of collective."""


@dataclass(frozen=True)
class UnitShape:
    """The parameters of one unit, without values.

    Args:
        name: of the module.
        specs: of the parameters that no inner unit has.
    """

    name: str
    specs: tuple[ParamSpec, ...]


@dataclass(frozen=True)
class RankBytes:
    """Bytes on one rank, by kind (Rules 1 and 2).

    Args:
        params: its shards.
        grads: their gradients.
        optimizer: what the optimizer keeps for them.
        whole_params_peak: peak of full parameters that are gathered at one time.
        whole_grads_peak: peak of full gradients that exist at one time.
    """

    params: int
    grads: int
    optimizer: int
    whole_params_peak: int
    whole_grads_peak: int

    @property
    def total(self) -> int:
        """All kinds at their peak, without activations."""
        kept = self.params + self.grads + self.optimizer
        return kept + self.whole_params_peak + self.whole_grads_peak


@dataclass(frozen=True)
class StateElsewhere:
    """What `offload_optimizer` keeps in CPU memory or in files for one rank, and how much it moves.

    Attributes:
        kept_bytes: bytes there, from the first step on.
        moved_bytes: bytes that a step copies to the device, and the same number back; the first
            step has none to fetch.
    """

    kept_bytes: int
    moved_bytes: int


@dataclass(frozen=True)
class TrainingPlan:
    """What one rank needs for a training step.

    Args:
        reshard_after_forward: of all units.
        world_size: W.
        replicas: R.
        numel: parameters of the model.
        padding_numel: elements, over all ranks, that belong to no parameter.
        rank_bytes: memory of the rank the plan is for.
        collectives: calls and bytes sent of one step, by kind.
        between_copies: the part of them that is between copies.
        elsewhere: optimizer state that is not in `rank_bytes`; None if all of it is.
    """

    reshard_after_forward: bool
    world_size: int
    replicas: int
    numel: int
    padding_numel: int
    rank_bytes: RankBytes
    collectives: Counts
    between_copies: Counts = field(default_factory=dict)
    elsewhere: StateElsewhere | None = None

    @property
    def padding_frac(self) -> float:
        """Padding as a fraction of all elements."""
        return self.padding_numel / max(1, self.numel + self.padding_numel)

    def __str__(self) -> str:
        """A table of bytes by kind and of collectives."""
        sizes = self.rank_bytes
        rows = [(kind, getattr(sizes, kind)) for kind in sizes.__dataclass_fields__]
        head = (
            f"{self.world_size} ranks x {self.replicas} copies, "
            f"{self.numel:,} parameters, padding {self.padding_frac:.4%}"
        )
        lines = [f"  {kind:18s} {_gib(size)}" for kind, size in [*rows, ("total", sizes.total)]]
        if self.elsewhere is not None:
            lines += [
                f"  {'state elsewhere':18s} {_gib(self.elsewhere.kept_bytes)}",
                f"  {'moved, each way':18s} {_gib(self.elsewhere.moved_bytes)} a step",
            ]
        lines += [
            f"  {kind:18s} {count.calls:6d} calls {_gib(count.wire_bytes)} sent"
            for kind, count in self.collectives.items()
        ]
        return "\n".join([head, *lines])


def _gib(size: int) -> str:
    return f"{size / 2**30:12.4f} GiB"


@dataclass(frozen=True)
class Part:
    """A segment of a unit, as one of W ranks has it.

    Args:
        segment: all of it.
        ways: W.
        shard_numel: of the longest range.
        numel: of the padded buffer.
        pieces: elements of each parameter that the rank has some of, and whether its state is a
            number, which stays with the optimizer.
    """

    segment: Segment
    ways: int
    shard_numel: int
    numel: int
    pieces: tuple[tuple[int, bool], ...]

    def shard_bytes(self, dtype: torch.dtype) -> int:
        """Of the longest range."""
        return self.shard_numel * dtype.itemsize

    def whole_bytes(self, dtype: torch.dtype) -> int:
        """Of the padded buffer."""
        return self.numel * dtype.itemsize

    @property
    def used_bytes(self) -> int:
        """Of the parameters that the rank has."""
        return sum(numel for numel, _ in self.pieces) * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.segment.layout.dtype

    def gathered_bytes(self, precision: Precision) -> int:
        """Of the whole buffer; none where the shard itself serves."""
        dtype = precision.compute_dtype(self.dtype)
        alias = self.ways == 1 and dtype == self.dtype
        return 0 if alias else self.whole_bytes(dtype)

    def message_bytes(self, precision: Precision) -> int:
        """Of what a rank gives to a gather."""
        return self.shard_bytes(precision.compute_dtype(self.dtype))

    def whole_grad_bytes(self, precision: Precision) -> int:
        """Of the whole gradients; none where they are frozen."""
        dtype = precision.reduction_dtype(self.dtype)
        return self.whole_bytes(dtype) if self.segment.trainable else 0


def parts_of(
    specs: Sequence[ParamSpec],
    ways: int,
    chosen: Boundary | BoundaryRules,
    rank: int,
) -> tuple[Part, ...]:
    segments = plan_segments(specs) if specs else ()
    if isinstance(chosen, BoundaryRules):
        chosen = replace(chosen, missing_ok=True)  # a plan is of all units
    boundary = resolve(chosen, specs, None)
    return tuple(_part(segment, ways, boundary, rank) for segment in segments)


def _part(segment: Segment, ways: int, boundary: Boundary, rank: int) -> Part:
    layout = segment.layout
    check_ranks(ways)
    check_boundary(boundary)
    boundary = boundary_in(layout, boundary)
    if boundary == "element":
        longest = even_numel(layout, ways)
        numel, start, stop = ways * longest, rank * longest, (rank + 1) * longest
    else:
        places = cut_places(layout, boundary)
        longest, numel = places.shortest_longest(ways), layout.numel
        start, stop = _range(places.runs(longest), rank, numel)
        longest = max(length for _, length, _ in places.runs(longest))
    own = boundaries_of(boundary, [spec.name for spec in layout.specs])
    whole = [ways == 1 or each != "element" for each in own]  # if it is a number
    pieces = tuple(
        (part.numel, whole[part.index] and not layout.specs[part.index].shape)
        for part in parts_between(layout, start, stop)
    )
    return Part(segment, ways, longest, numel, pieces)


def _range(runs: Iterable[tuple[int, int, int]], rank: int, end: int) -> tuple[int, int]:
    """One rank's, of runs of ranges that are alike."""
    for start, length, count in runs:
        if rank < count:
            return start + rank * length, start + (rank + 1) * length
        rank -= count
    return end, end


def unit_shapes(
    module: nn.Module, *, units: type[nn.Module] | tuple[type[nn.Module], ...] = ()
) -> tuple[UnitShape, ...]:
    """Divide a module into units by class, as nested `fully_shard` calls do.

    Args:
        module: the root, which becomes the outermost unit; meta parameters will do.
        units: classes whose instances become units.

    Returns:
        Inner units in the order of the module walk, the root last.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU())
        >>> [shape.name for shape in unit_shapes(model, units=nn.Linear)]
        ['0', '1', '']
    """
    taken: set[nn.Parameter] = set()
    shapes: list[UnitShape] = []
    inner = [pair for pair in module.named_modules() if pair[0] and isinstance(pair[1], units)]
    for name, child in sorted(inner, key=lambda pair: -pair[0].count(".")):
        shapes.append(_shape_of(name, child, taken))
    position = {name: index for index, (name, _) in enumerate(inner)}
    shapes.sort(key=lambda shape: position[shape.name])
    return (*shapes, _shape_of("", module, taken))


def _shape_of(name: str, module: nn.Module, taken: set[nn.Parameter]) -> UnitShape:
    specs, params = collect_params(module, ignored=taken)
    taken.update(params)
    return UnitShape(name, specs)


def plan_training(
    units: Sequence[UnitShape],
    *,
    world_size: int,
    replicas: int = 1,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    boundary: Boundary | BoundaryRules = "element",
    state_tensors: int = 2,
    microbatches: int = 1,
    offload_bucket_numel: int | None = None,
    rank: int = 0,
) -> TrainingPlan:
    """Say what `fully_shard` with these arguments will need, before you have the machines.

    Pure: shapes in, numbers out; as fast for many ranks as for few (Rule 6).
    A stage of a pipeline is a plan of its units alone, with its `microbatches`.

    Args:
        units: the outermost last, as `unit_shapes` gives them.
        world_size: ranks that share one copy; 1 where nothing is sharded.
        replicas: copies.
        reshard_after_forward: as in `fully_shard`, True or False.
        mp_policy: as in `fully_shard`.
        boundary: as in `fully_shard`, except `by_class`.
        state_tensors: tensors of a parameter's size that the optimizer keeps; AdamW: 2.
        microbatches: forward and backward passes of a step, all but the last inside `no_sync`.
        offload_bucket_numel: `bucket_numel` of `offload_optimizer`; None where state stays.
        rank: whose memory to report; the first has the least padding.

    Raises:
        LayoutError: no units, no microbatches, empty buckets, or a rank that does not exist.

    Example:
        >>> from flat_param.plan import ParamSpec, UnitShape
        >>> shape = UnitShape("", (ParamSpec("w", (6, 4), torch.float32),))
        >>> plan = plan_training([shape], world_size=2)
        >>> plan.rank_bytes.params, plan.rank_bytes.optimizer
        (48, 96)
    """
    _check_count("world_size", world_size)
    _check_count("replicas", replicas)
    _check(units, rank, world_size, microbatches, offload_bucket_numel)
    precision = precision_of(mp_policy, where="plan_training")
    frees = bool(reshard_after_forward)
    known: dict[tuple[ParamSpec, ...], tuple[Part, ...]] = {}
    for unit in units:
        if unit.specs not in known:
            known[unit.specs] = parts_of(unit.specs, world_size, boundary, rank)
    parts = [known[unit.specs] for unit in units]
    within, between = _collectives(parts, frees, precision, replicas, microbatches)
    sizes = _rank_bytes(parts, frees, precision, state_tensors, microbatches)
    elsewhere = None
    if offload_bucket_numel is not None:
        elsewhere, near = _offloaded(parts, state_tensors, offload_bucket_numel)
        sizes = replace(sizes, optimizer=near)
    return TrainingPlan(
        reshard_after_forward=frees,
        world_size=world_size,
        replicas=replicas,
        numel=sum(spec.numel for unit in units for spec in unit.specs),
        padding_numel=sum(part.numel - part.segment.layout.used_numel for p in parts for part in p),
        rank_bytes=sizes,
        collectives=_total(within, between),
        between_copies=between,
        elsewhere=elsewhere,
    )


def _check_count(name: str, count: object) -> None:
    if type(count) is not int or count < 1:
        raise LayoutError(
            f"flat_param.plan_training: {name} is {count!r}, but it is a number of ranks, and "
            "there is one at least. Pass a whole number above 0."
        )


def _check(
    units: Sequence[UnitShape], rank: int, ways: int, microbatches: int, bucket_numel: int | None
) -> None:
    if not units:
        raise LayoutError(
            "flat_param.plan_training: units is empty, but a plan needs the outermost unit. "
            "Pass unit_shapes(module)."
        )
    if not 0 <= rank < ways:
        raise LayoutError(
            f"flat_param.plan_training: rank is {rank}, but ranks that share a copy are 0 to "
            f"{ways - 1}. Choose one of them."
        )
    if microbatches < 1:
        raise LayoutError(
            f"flat_param.plan_training: microbatches is {microbatches}, but a step has at least "
            "one. Pass the number of passes in a step."
        )
    if bucket_numel is not None and bucket_numel < 1:
        raise LayoutError(
            f"flat_param.plan_training: offload_bucket_numel is {bucket_numel}, but a bucket "
            "holds at least one element. Pass the bucket_numel of offload_optimizer."
        )


def _rank_bytes(
    parts: Sequence[tuple[Part, ...]],
    frees: bool,
    precision: Precision,
    state_tensors: int,
    microbatches: int,
) -> RankBytes:
    every = [part for unit in parts for part in unit]
    trained = [part for part in every if part.segment.trainable]
    whole = [sum(part.gathered_bytes(precision) for part in unit) for unit in parts]
    grads = [sum(part.whole_grad_bytes(precision) for part in unit) for unit in parts]
    return RankBytes(
        params=sum(part.shard_bytes(part.dtype) for part in every),
        grads=sum(part.shard_bytes(part.dtype) for part in trained),
        optimizer=state_tensors * sum(part.used_bytes for part in trained),
        whole_params_peak=_outermost_and_two(whole) if frees else sum(whole),
        whole_grads_peak=_outermost_and_two(grads) if microbatches == 1 else sum(grads),
    )


def _offloaded(
    parts: Sequence[tuple[Part, ...]], state_tensors: int, bucket_numel: int
) -> tuple[StateElsewhere, int]:
    """What is elsewhere, and the bytes that are on the device at most (Rule 5)."""
    trained = [part for unit in parts for part in unit if part.segment.trainable]
    sizes = [(part.dtype.itemsize, *piece) for part in trained for piece in part.pieces]
    moved = sorted((n * size for size, n, stays in sizes if not stays), reverse=True)
    stays = sum(n * size for size, n, stays in sizes if stays)
    largest = bucket_numel * max((size for size, _, _ in sizes), default=0)
    near = min(sum(moved), sum(max(largest, each) for each in moved[:2]))
    kept = sum(aligned_nbytes(each) for each in moved)
    elsewhere = StateElsewhere(state_tensors * kept, state_tensors * sum(moved))
    return elsewhere, state_tensors * (near + stays)


def _outermost_and_two(sizes: Sequence[int]) -> int:
    return sizes[-1] + sum(sorted(sizes[:-1])[-2:])


def _collectives(
    parts: Sequence[tuple[Part, ...]],
    frees: bool,
    precision: Precision,
    copies: int,
    microbatches: int,
) -> tuple[Counts, Counts]:
    """Calls and bytes sent by one rank in one step (Rules 3 and 4): inside a copy, and between."""
    gathers: list[int] = []
    sums: list[int] = []
    flags = 0
    for position, unit in enumerate(parts):
        passes = microbatches if frees else 1
        again = frees and position < len(parts) - 1
        for part in unit:
            gathers += [part.message_bytes(precision)] * (passes * (1 + again))
            if part.segment.trainable:
                flags += len(part.segment.layout.specs)
                sums.append(part.shard_bytes(precision.reduction_dtype(part.dtype)))
    flags += ORDER_BYTES if sums else 0
    ways = next((part.ways for unit in parts for part in unit), 1)
    within = {
        "all_gather": _count(((ways - 1) * size for size in gathers), ways),
        "reduce_scatter": _count(((ways - 1) * size for size in sums), ways),
        "all_reduce": _count([_both_ways(flags, ways)], ways),
    }
    between = {"all_reduce": _count((_both_ways(size, copies) for size in [*sums, flags]), copies)}
    return _made(within), _made(between)


def _made(found: Counts) -> Counts:
    return {kind: count for kind, count in found.items() if count.calls}


def _total(first: Counts, second: Counts) -> Counts:
    none = CommCount()
    kinds = {**first, **second}
    return {kind: _add(first.get(kind, none), second.get(kind, none)) for kind in kinds}


def _both_ways(size: int, ranks: int) -> int:
    return 2 * (ranks - 1) * size // ranks


def _count(sizes: Iterable[int], ranks: int) -> CommCount:
    sent = list(sizes)
    return CommCount(len(sent), sum(sent)) if ranks > 1 else CommCount()


def _add(first: CommCount, second: CommCount) -> CommCount:
    return CommCount(first.calls + second.calls, first.wire_bytes + second.wire_bytes)
