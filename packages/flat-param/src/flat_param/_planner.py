"""What sharded training will need, from shapes alone.

Legend: `shard` is one rank's part of a unit; `whole` is a unit's buffer of all parts; W is the
number of ranks that share one copy, R the number of copies.

Rule 1: what a rank keeps all the time: shards, their gradients, the optimizer's state.
Rule 2: what it holds for a while: with FULL_SHARD the whole parameters of the outermost unit and of
        the two largest others (one computes, one is gathered ahead); with SHARD_GRAD_OP all;
        and whole gradients of the outermost and the two largest (one fills, one is summed).
Rule 3: a gather or a sum sends (W - 1) shards from each rank, a sum over copies
        2 * (R - 1) / R of a shard: what a bandwidth-optimal algorithm sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ._errors import LayoutError
from ._training_plan import RankBytes, TrainingPlan, UnitShape
from .comm._comm import CommCount
from .comm._trail import ORDER_BYTES
from .layout._boundary import Boundary
from .layout._boundary_rules import BoundaryRules, resolve
from .layout._layout import Segment, plan_segments
from .layout._shard import ShardPlan, plan_shard
from .layout._spec import collect_params
from .layout._strategy import MixedPrecision, Strategy


def unit_shapes(
    module: nn.Module, *, units: type[nn.Module] | tuple[type[nn.Module], ...] = ()
) -> tuple[UnitShape, ...]:
    """Divide a module into units by class, as nested `fully_shard` calls do.

    Args:
        module: the root, which becomes the outermost unit; meta parameters will do.
        units: classes whose instances become units of their own.

    Returns:
        Inner units in the order of the module walk, the root last.

    Example:
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
    strategy: Strategy | str = Strategy.FULL_SHARD,
    replicas: int = 1,
    mixed_precision: MixedPrecision | None = None,
    boundary: Boundary | BoundaryRules = "element",
    state_tensors: int = 2,
    rank: int = 0,
) -> TrainingPlan:
    """Say what `fully_shard` with these arguments will need, before there is a machine for it.

    Pure: shapes in, numbers out. O(W) per unit.

    Args:
        units: the outermost last, as `unit_shapes` gives them.
        world_size: ranks that share one copy; with NO_SHARD, all ranks.
        strategy: as in `fully_shard`.
        replicas: copies, for HYBRID_SHARD.
        mixed_precision: as in `fully_shard`.
        boundary: as in `fully_shard`, but for `by_class`.
        state_tensors: tensors of a parameter's size that the optimizer keeps; AdamW: 2.
        rank: whose memory to report; the first has the least padding.

    Raises:
        LayoutError: no units, or a rank that is not there.

    Example:
        >>> from flat_param import ParamSpec, UnitShape
        >>> shape = UnitShape("", (ParamSpec("w", (6, 4), torch.float32),))
        >>> plan = plan_training([shape], world_size=2)
        >>> plan.rank_bytes.params, plan.rank_bytes.optimizer
        (48, 96)
    """
    chosen = Strategy(strategy)
    alone = chosen is Strategy.NO_SHARD
    ways, copies = (1, world_size) if alone else (world_size, replicas)
    _check(units, rank, ways)
    precision = mixed_precision or MixedPrecision()
    parts = [_parts(unit, ways, boundary) for unit in units]
    return TrainingPlan(
        strategy=chosen,
        world_size=ways,
        replicas=copies,
        numel=sum(spec.numel for unit in units for spec in unit.specs),
        padding_numel=sum(
            part.plan.numel - part.plan.layout.used_numel for p in parts for part in p
        ),
        rank_bytes=_rank_bytes(parts, chosen, precision, state_tensors, rank),
        collectives=_collectives(parts, chosen, precision, copies),
    )


@dataclass(frozen=True)
class _Part:
    segment: Segment
    plan: ShardPlan

    def shard_bytes(self, dtype: torch.dtype) -> int:
        return self.plan.shard_numel * dtype.itemsize

    def whole_bytes(self, dtype: torch.dtype) -> int:
        return self.plan.numel * dtype.itemsize

    def used_bytes(self, rank: int) -> int:
        used = sum(part.numel for part in self.plan.parts(rank))
        return used * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        return self.plan.layout.dtype

    @property
    def padding_numel(self) -> int:
        return self.plan.numel - self.plan.layout.used_numel


def _check(units: Sequence[UnitShape], rank: int, ways: int) -> None:
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


def _parts(unit: UnitShape, ways: int, chosen: Boundary | BoundaryRules) -> tuple[_Part, ...]:
    segments = plan_segments(unit.specs) if unit.specs else ()
    if isinstance(chosen, BoundaryRules):
        chosen = replace(chosen, missing_ok=True)  # a plan is of all units
    boundary = resolve(chosen, unit.specs, None)
    return tuple(
        _Part(segment, plan_shard(segment.layout, world_size=ways, boundary=boundary))
        for segment in segments
    )


def _rank_bytes(
    parts: Sequence[tuple[_Part, ...]],
    strategy: Strategy,
    precision: MixedPrecision,
    state_tensors: int,
    rank: int,
) -> RankBytes:
    every = [part for unit in parts for part in unit]
    trained = [part for part in every if part.segment.trainable]
    whole = [sum(_gathered_bytes(part, precision) for part in unit) for unit in parts]
    grads = [sum(_whole_grad_bytes(part, precision) for part in unit) for unit in parts]
    frees = strategy.frees_after_forward
    return RankBytes(
        params=sum(part.shard_bytes(part.dtype) for part in every),
        grads=sum(part.shard_bytes(precision.grad_dtype(part.dtype)) for part in trained),
        optimizer=state_tensors * sum(part.used_bytes(rank) for part in trained),
        whole_params_peak=_outermost_and_two(whole) if frees else sum(whole),
        whole_grads_peak=_outermost_and_two(grads),
    )


def _gathered_bytes(part: _Part, precision: MixedPrecision) -> int:
    """Bytes of a segment's whole buffer; none where the shard itself serves."""
    dtype = precision.compute_dtype(part.dtype)
    alias = part.plan.world_size == 1 and dtype == part.dtype
    return 0 if alias else part.whole_bytes(dtype)


def _whole_grad_bytes(part: _Part, precision: MixedPrecision) -> int:
    dtype = precision.reduction_dtype(part.dtype)
    return part.whole_bytes(dtype) if part.segment.trainable else 0


def _outermost_and_two(sizes: Sequence[int]) -> int:
    return sizes[-1] + sum(sorted(sizes[:-1])[-2:])


def _collectives(
    parts: Sequence[tuple[_Part, ...]],
    strategy: Strategy,
    precision: MixedPrecision,
    copies: int,
) -> dict[str, CommCount]:
    """Calls and bytes sent by one rank in one step (Rule 3)."""
    gathers: list[int] = []
    sums: list[int] = []
    over_copies: list[int] = []
    flags = 0
    for position, unit in enumerate(parts):
        again = strategy.frees_after_forward and position < len(parts) - 1
        for part in unit:
            gathers += [part.shard_bytes(precision.compute_dtype(part.dtype))] * (1 + again)
            if part.segment.trainable:
                flags += len(part.segment.layout.specs)
                reduced = part.shard_bytes(precision.reduction_dtype(part.dtype))
                sums.append(reduced)
                over_copies.append(reduced)
    flags += ORDER_BYTES if sums else 0
    ways = next((part.plan.world_size for unit in parts for part in unit), 1)
    found = {
        "all_gather": _count(((ways - 1) * size for size in gathers), ways),
        "reduce_scatter": _count(((ways - 1) * size for size in sums), ways),
        "all_reduce": _add(
            _count((_both_ways(size, copies) for size in [*over_copies, flags]), copies),
            _count([_both_ways(flags, ways)], ways),
        ),
    }
    return {kind: count for kind, count in found.items() if count.calls}


def _both_ways(size: int, ranks: int) -> int:
    return 2 * (ranks - 1) * size // ranks


def _count(sizes: Iterable[int], ranks: int) -> CommCount:
    sent = list(sizes)
    return CommCount(len(sent), sum(sent)) if ranks > 1 else CommCount()


def _add(first: CommCount, second: CommCount) -> CommCount:
    return CommCount(first.calls + second.calls, first.wire_bytes + second.wire_bytes)
