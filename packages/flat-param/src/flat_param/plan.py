"""Layouts, shards, and the needs of sharded training, from shapes only.

W is the number of ranks that share one replica of the parameters, R the number of replicas.

- A rank always keeps its shards, their gradients and the optimizer's state.
- At the peak, three units have full parameters and gradients: the outermost one and the two largest
  others. One computes while another one is gathered or reduced.
- An all-gather or a reduce-scatter sends (W - 1) shards from each rank, an all-reduce over replicas
  2 * (R - 1) / R of a shard, as in bandwidth-optimal algorithms.
- All microbatches but the last run inside `no_sync`: full gradients are kept until the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from ._errors import LayoutError
from .comm._comm import CommCount
from .comm._trail import ORDER_BYTES
from .layout._arguments import check_is_module
from .layout._boundary import Boundary
from .layout._boundary_rules import BoundaryRules, resolve
from .layout._layout import FlatLayout, Segment, plan_layout, plan_segments
from .layout._options import Precision, precision_of
from .layout._shard import ShardPart, ShardPlan, plan_shard
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
    "TrainingPlan",
    "UnitShape",
    "collect_params",
    "plan_layout",
    "plan_segments",
    "plan_shard",
    "plan_training",
    "unit_shapes",
]

Counts = dict[str, CommCount]


@dataclass(frozen=True)
class UnitShape:
    """The parameters of one unit, without values.

    Args:
        name: of the module.
        specs: of the parameters that are in no inner unit.
    """

    name: str
    specs: tuple[ParamSpec, ...]


@dataclass(frozen=True)
class RankBytes:
    """Bytes on the rank with the longest shards, padding included.

    Args:
        params: its shards.
        grads: their gradients.
        optimizer: the optimizer's state for them.
        whole_params_peak: peak of full parameters that are gathered at the same time.
        whole_grads_peak: peak of full gradients that exist at the same time.
    """

    params: int
    grads: int
    optimizer: int
    whole_params_peak: int
    whole_grads_peak: int

    @property
    def total(self) -> int:
        """Sum of all fields, without activations."""
        kept = self.params + self.grads + self.optimizer
        return kept + self.whole_params_peak + self.whole_grads_peak


@dataclass(frozen=True)
class TrainingPlan:
    """What one rank needs for a training step.

    Args:
        reshard_after_forward: of all units.
        world_size: W.
        replicas: R.
        numel: parameters of the model.
        padding_numel: padding elements over all ranks.
        rank_bytes: memory of a rank.
        collectives: calls and bytes sent in one step, by kind; `all_reduce` is between replicas,
            plus a few bytes.
    """

    reshard_after_forward: bool
    world_size: int
    replicas: int
    numel: int
    padding_numel: int
    rank_bytes: RankBytes
    collectives: Counts

    @property
    def padding_frac(self) -> float:
        """Padding as a fraction of all elements."""
        return self.padding_numel / max(1, self.numel + self.padding_numel)

    def __str__(self) -> str:
        """Format bytes by kind and collectives as a table."""
        sizes = self.rank_bytes
        rows = [(kind, getattr(sizes, kind)) for kind in sizes.__dataclass_fields__]
        head = (
            f"{self.world_size} ranks x {self.replicas} copies, "
            f"{self.numel:,} parameters, padding {self.padding_frac:.4%}"
        )
        lines = [f"  {kind:18s} {_gib(size)}" for kind, size in [*rows, ("total", sizes.total)]]
        lines += [
            f"  {kind:18s} {count.calls:6d} calls {_gib(count.wire_bytes)} sent"
            for kind, count in self.collectives.items()
        ]
        return "\n".join([head, *lines])


def _gib(size: int) -> str:
    return f"{size / 2**30:12.4f} GiB"


def unit_shapes(
    module: nn.Module, *, units: type[nn.Module] | tuple[type[nn.Module], ...] = ()
) -> tuple[UnitShape, ...]:
    """Divide a module into units by class, like nested `fully_shard` calls.

    Args:
        module: the root, which becomes the outermost unit; meta parameters are enough.
        units: classes whose instances become units.

    Returns:
        Inner units in the order of the module walk, the root last.

    Raises:
        StateError: `module` is not a module.
        LayoutError: `units` are not classes of modules.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU())
        >>> [shape.name for shape in unit_shapes(model, units=nn.Linear)]
        ['0', '1', '']
    """
    check_is_module("unit_shapes", module)
    kinds = units if isinstance(units, tuple) else (units,)
    if not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
        raise LayoutError(
            f"flat_param.unit_shapes: units is {units!r}, but it must be a class of modules, or a "
            "tuple of classes. Write for example units=nn.TransformerEncoderLayer."
        )
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
) -> TrainingPlan:
    """Compute memory and communication of `fully_shard` without the machines.

    Pure: from shapes to numbers. For a pipeline stage, pass its units only.

    Args:
        units: the outermost last, as `unit_shapes` returns them.
        world_size: ranks that share one replica; 1 if nothing is sharded.
        replicas: number of replicas.
        reshard_after_forward: as in `fully_shard`, True or False.
        mp_policy: as in `fully_shard`.
        boundary: as in `fully_shard`.
        state_tensors: tensors of a parameter's size that the optimizer keeps; AdamW: 2; 0 with
            `offload_optimizer`, which needs two buckets of them instead.
        microbatches: forward and backward passes of a step, all but the last inside `no_sync`.

    Raises:
        LayoutError: no units, or a number below 1.

    Example:
        >>> import torch
        >>> from flat_param.plan import ParamSpec, UnitShape
        >>> shape = UnitShape("", (ParamSpec("w", (6, 4), torch.float32),))
        >>> plan = plan_training([shape], world_size=2)
        >>> plan.rank_bytes.params, plan.rank_bytes.optimizer
        (48, 96)
    """
    if not isinstance(units, (list, tuple)) or not all(isinstance(u, UnitShape) for u in units):
        raise LayoutError(
            f"flat_param.plan_training: units is a {type(units).__name__}, but a plan is made of "
            "the shapes of units. Pass unit_shapes(module, units=...)."
        )
    if not units:
        raise LayoutError(
            "flat_param.plan_training: units is empty, but a plan needs the outermost unit. "
            "Pass unit_shapes(module)."
        )
    counts = {"world_size": world_size, "replicas": replicas, "microbatches": microbatches}
    for name, count in {**counts, "state_tensors": state_tensors}.items():
        least = int(name in counts)
        if type(count) is not int or count < least:
            raise LayoutError(
                f"flat_param.plan_training: {name} is {count!r}, but it must be a whole number of "
                f"at least {least}."
            )
    precision = precision_of(mp_policy, where="plan_training")
    frees = bool(reshard_after_forward)
    known: dict[tuple[ParamSpec, ...], list[_Part]] = {}
    for unit in units:
        if unit.specs not in known:
            known[unit.specs] = _parts_of(unit.specs, world_size, boundary, precision)
    parts = [known[unit.specs] for unit in units]
    every = [part for unit in parts for part in unit]
    whole = [sum(part.whole_bytes for part in unit) for unit in parts]
    grads = [sum(part.whole_grad_bytes for part in unit) for unit in parts]
    kept = sum(part.shard_bytes for part in every if part.segment.trainable)
    return TrainingPlan(
        reshard_after_forward=frees,
        world_size=world_size,
        replicas=replicas,
        numel=sum(spec.numel for unit in units for spec in unit.specs),
        padding_numel=sum(part.plan.numel - part.segment.layout.used_numel for part in every),
        rank_bytes=RankBytes(
            params=sum(part.shard_bytes for part in every),
            grads=kept,
            optimizer=state_tensors * kept,
            whole_params_peak=_outermost_and_two(whole) if frees else sum(whole),
            whole_grads_peak=_outermost_and_two(grads) if microbatches == 1 else sum(grads),
        ),
        collectives=_collectives(parts, frees, world_size, replicas, microbatches),
    )


@dataclass(frozen=True)
class _Part:
    """A segment of a unit, cut for W ranks; sizes are of the longest shard."""

    segment: Segment
    plan: ShardPlan
    precision: Precision

    @property
    def shard_bytes(self) -> int:
        return self.plan.shard_numel * self.segment.layout.dtype.itemsize

    @property
    def message_bytes(self) -> int:
        """Bytes of this rank's part of an all-gather."""
        dtype = self.precision.compute_dtype(self.segment.layout.dtype)
        return self.plan.shard_numel * dtype.itemsize

    @property
    def sum_bytes(self) -> int:
        """Bytes of this rank's part of a reduction."""
        dtype = self.precision.reduction_dtype(self.segment.layout.dtype)
        return self.plan.shard_numel * dtype.itemsize

    @property
    def whole_bytes(self) -> int:
        """Bytes of the gathered buffer; 0 if the shard itself is used."""
        dtype = self.segment.layout.dtype
        compute = self.precision.compute_dtype(dtype)
        is_shard = self.plan.world_size == 1 and compute == dtype
        return 0 if is_shard else self.plan.numel * compute.itemsize

    @property
    def whole_grad_bytes(self) -> int:
        """Bytes of the full gradients; 0 if they are frozen."""
        dtype = self.precision.reduction_dtype(self.segment.layout.dtype)
        return self.plan.numel * dtype.itemsize if self.segment.trainable else 0


def _parts_of(
    specs: Sequence[ParamSpec],
    world_size: int,
    boundary: Boundary | BoundaryRules,
    precision: Precision,
) -> list[_Part]:
    if isinstance(boundary, BoundaryRules):
        boundary = replace(boundary, missing_ok=True)  # a plan is for all units
    chosen = resolve(boundary, specs, where="plan_training")
    segments = plan_segments(specs) if specs else ()
    return [
        _Part(each, plan_shard(each.layout, world_size=world_size, boundary=chosen), precision)
        for each in segments
    ]


def _outermost_and_two(sizes: Sequence[int]) -> int:
    return sizes[-1] + sum(sorted(sizes[:-1])[-2:])


def _collectives(
    parts: Sequence[Sequence[_Part]], frees: bool, ways: int, copies: int, microbatches: int
) -> Counts:
    """Return calls and bytes sent by one rank in one step."""
    gathers: list[int] = []
    sums: list[int] = []
    flags = 0
    for position, unit in enumerate(parts):
        passes = microbatches if frees else 1
        again = frees and position < len(parts) - 1
        for part in unit:
            gathers += [part.message_bytes] * (passes * (1 + again))
            if part.segment.trainable:
                flags += len(part.segment.layout.specs)
                sums.append(part.sum_bytes)
    flags += ORDER_BYTES if sums else 0
    reduced = [*(_both_ways(size, copies) for size in sums), _both_ways(flags, copies)]
    found = {
        "all_gather": _count(((ways - 1) * size for size in gathers), ways),
        "reduce_scatter": _count(((ways - 1) * size for size in sums), ways),
        "all_reduce": _add(_count([_both_ways(flags, ways)], ways), _count(reduced, copies)),
    }
    return {kind: count for kind, count in found.items() if count.calls}


def _both_ways(size: int, ranks: int) -> int:
    return 2 * (ranks - 1) * size // ranks


def _count(sizes: Iterable[int], ranks: int) -> CommCount:
    sent = list(sizes)
    return CommCount(len(sent), sum(sent)) if ranks > 1 else CommCount()


def _add(first: CommCount, second: CommCount) -> CommCount:
    return CommCount(first.calls + second.calls, first.wire_bytes + second.wire_bytes)
