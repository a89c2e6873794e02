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
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from ._errors import LayoutError
from ._planned_part import Part, parts_of
from ._training_plan import Counts, RankBytes, StateElsewhere, TrainingPlan, UnitShape
from .comm._comm import CommCount
from .comm._trail import ORDER_BYTES
from .layout._boundary import Boundary
from .layout._boundary_rules import BoundaryRules
from .layout._options import Precision, precision_of
from .layout._spec import ParamSpec, collect_params
from .offload._tiers import aligned

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


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
        >>> from flat_param import ParamSpec, UnitShape
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
    kept = sum(aligned(each) for each in moved)
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
