"""Layouts, shards, and the memory of sharded training, from shapes only.

- A rank always keeps its shards, their gradients and the optimizer's state.
- At the peak, three units have full parameters and gradients: the outermost one and the two largest
  others. One computes while another one is gathered or reduced.
- All microbatches but the last run inside `no_sync`: full gradients are kept until the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from ._errors import LayoutError
from .comm._comm import CommCount
from .layout._arguments import check_is_module
from .layout._boundary import Boundary, check_boundary
from .layout._layout import FlatLayout, Segment, plan_layout, plan_segments
from .layout._options import compute_dtype, precision_of, reduction_dtype
from .layout._shard import ShardPlan, plan_shard
from .layout._spec import ParamSpec, collect_params

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


__all__ = [
    "CommCount",
    "FlatLayout",
    "ParamSpec",
    "Segment",
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
class TrainingPlan:
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

    def __str__(self) -> str:
        """Format bytes by kind as a table."""
        kinds = (*self.__dataclass_fields__, "total")
        return "\n".join(f"{kind:18s} {getattr(self, kind) / 2**30:12.4f} GiB" for kind in kinds)


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
    shapes: dict[str, UnitShape] = {}
    inner = [pair for pair in module.named_modules() if pair[0] and isinstance(pair[1], units)]
    for name, child in (*sorted(inner, key=lambda pair: -pair[0].count(".")), ("", module)):
        specs, params = collect_params(child, ignored=taken)
        taken.update(params)
        shapes[name] = UnitShape(name, specs)
    return tuple(shapes[name] for name, _ in (*inner, ("", module)))


def plan_training(
    units: Sequence[UnitShape],
    *,
    world_size: int,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    boundary: Boundary = "element",
    state_tensors: int = 2,
    microbatches: int = 1,
) -> TrainingPlan:
    """Compute the memory of `fully_shard` without the machines.

    Pure: from shapes to numbers. For a pipeline stage, pass its units only.

    Args:
        units: the outermost last, as `unit_shapes` returns them.
        world_size: ranks that share one replica; 1 if nothing is sharded.
        reshard_after_forward: as in `fully_shard`, True or False.
        mp_policy: as in `fully_shard`.
        boundary: as in `fully_shard`.
        state_tensors: tensors of a parameter's size that the optimizer keeps; AdamW: 2; 0 with
            `offload_optimizer`, which needs one bucket of them instead.
        microbatches: forward and backward passes of a step, all but the last inside `no_sync`.

    Raises:
        LayoutError: no units, or a number below 1.

    Example:
        >>> import torch
        >>> from flat_param.plan import ParamSpec, UnitShape
        >>> shape = UnitShape("", (ParamSpec("w", (6, 4), torch.float32),))
        >>> plan = plan_training([shape], world_size=2)
        >>> plan.params, plan.optimizer
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
    counts = {"world_size": world_size, "microbatches": microbatches}
    for name, count in {**counts, "state_tensors": state_tensors}.items():
        least = int(name in counts)
        if type(count) is not int or count < least:
            raise LayoutError(
                f"flat_param.plan_training: {name} is {count!r}, but it must be a whole number of "
                f"at least {least}."
            )
    check_boundary(boundary, where="plan_training")
    precision = precision_of(mp_policy, where="plan_training")
    known: dict[tuple[ParamSpec, ...], _UnitBytes] = {}
    for unit in units:
        if unit.specs not in known:
            known[unit.specs] = _bytes_of(unit.specs, world_size, boundary, precision)
    sizes = [known[unit.specs] for unit in units]
    trained = sum(each.trained for each in sizes)
    whole = [each.whole_params for each in sizes]
    grads = [each.whole_grads for each in sizes]
    at_a_time = 1 if world_size == 1 else 2  # while one is reduced over ranks, the next is filled
    return TrainingPlan(
        params=sum(each.params for each in sizes),
        grads=trained,
        optimizer=state_tensors * trained,
        whole_params_peak=_outermost_and(2, whole) if reshard_after_forward else sum(whole),
        whole_grads_peak=_outermost_and(at_a_time, grads) if microbatches == 1 else sum(grads),
    )


@dataclass
class _UnitBytes:
    """Bytes of a unit on the rank with the longest shards."""

    params: int = 0
    trained: int = 0
    whole_params: int = 0
    whole_grads: int = 0


def _bytes_of(
    specs: Sequence[ParamSpec],
    world_size: int,
    boundary: Boundary,
    precision: MixedPrecisionPolicy,
) -> _UnitBytes:
    sizes = _UnitBytes()
    for segment in plan_segments(specs):
        plan = plan_shard(segment.layout, world_size=world_size, boundary=boundary)
        dtype = segment.layout.dtype
        compute = compute_dtype(precision, dtype)
        sizes.params += plan.shard_numel * dtype.itemsize
        if world_size > 1 or compute != dtype:  # otherwise the shard itself is used
            sizes.whole_params += plan.numel * compute.itemsize
        if segment.trainable:
            sizes.trained += plan.shard_numel * dtype.itemsize
            sizes.whole_grads += plan.numel * reduction_dtype(precision, dtype).itemsize
    return sizes


def _outermost_and(count: int, sizes: Sequence[int]) -> int:
    return sizes[-1] + sum(sorted(sizes[:-1])[-count:])
