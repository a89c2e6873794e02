"""What each sharding strategy keeps, and the numeric and scheduling choices of a unit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from .._errors import LayoutError, StateError
from ._boundary import Boundary

_BEFORE, _AFTER = "BACKWARD_PRE", "BACKWARD_POST"


class Strategy(str, Enum):
    """How a unit divides memory between ranks.

    | strategy | parameters | gradients and optimizer state | ranks that share |
    |---|---|---|---|
    | NO_SHARD | whole | whole | none |
    | SHARD_GRAD_OP (ZeRO-2) | shard; whole from forward to backward | shard | all |
    | FULL_SHARD (ZeRO-3) | shard; whole only while in use | shard | all |
    | HYBRID_SHARD | as FULL_SHARD | shard | one row of a 2-D mesh; rows are replicas |

    Example:
        >>> Strategy("FULL_SHARD").frees_after_forward
        True
    """

    NO_SHARD = "NO_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    FULL_SHARD = "FULL_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"

    @classmethod
    def _missing_(cls, value: object) -> Strategy:
        words = ", ".join(f"'{each.value}'" for each in cls)
        raise LayoutError(
            f"flat_param.Strategy: strategy is {value!r}, but it must be one of {words}. "
            "Use 'FULL_SHARD' to divide everything."
        )

    @property
    def frees_after_forward(self) -> bool:
        """Whether whole parameters are dropped between forward and backward."""
        return self in (Strategy.FULL_SHARD, Strategy.HYBRID_SHARD)


def _can_compute(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes that a unit computes and communicates in. Shards keep the parameters' own dtype.

    Args:
        param_dtype: of whole parameters in forward and backward; None keeps their own.
        reduce_dtype: in which gradients are summed over ranks; None takes the computing dtype.
        keep_low_precision_grads: leave `.grad` in the reduce dtype.
        cast_forward_inputs: cast floating-point inputs of the unit to `param_dtype`.
        output_dtype: cast floating-point outputs of the unit to it, after its forward hooks.
        buffer_dtype: cast floating-point buffers to it when the unit is made; the state dict has
            them in their original dtype.

    Raises:
        LayoutError: nothing can be computed or summed in the dtype.

    Example:
        >>> MixedPrecision(param_dtype=torch.bfloat16).compute_dtype(torch.float32)
        torch.bfloat16
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = True
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            dtype: torch.dtype | None = getattr(self, name)
            if dtype is not None and not _can_compute(dtype):
                raise LayoutError(
                    f"flat_param.MixedPrecision: {name} is {dtype!r}, but torch computes in "
                    "floating point of 16 bits or more. Use torch.bfloat16."
                )

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter of `dtype` computes; only floating point is cast."""
        return self.param_dtype or dtype if dtype.is_floating_point else dtype

    def reduction_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the gradient of a parameter of `dtype` is summed."""
        return self.reduce_dtype or self.compute_dtype(dtype) if dtype.is_floating_point else dtype

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of `.grad` of a parameter of `dtype`."""
        return self.reduction_dtype(dtype) if self.keep_low_precision_grads else dtype


@dataclass(frozen=True)
class UnitOptions:
    """How one unit is sharded; see `fully_shard` for the meaning of each field."""

    strategy: Strategy
    mixed_precision: MixedPrecision
    boundary: Boundary
    cpu_offload: bool
    forward_prefetch: bool
    backward_prefetch: bool | str
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if self.backward_prefetch not in (True, False, _BEFORE, _AFTER):
            raise StateError(
                f"flat_param.fully_shard: backward_prefetch is {self.backward_prefetch!r}, but the "
                f"next unit is gathered while this one computes, after it, or in its turn. Pass "
                f"True or '{_BEFORE}', '{_AFTER}', or False."
            )

    @property
    def prefetches_in_backward(self) -> bool:
        """Whether the next unit is gathered while this one's gradients are computed."""
        return self.backward_prefetch in (True, _BEFORE)

    @property
    def prefetches_after_backward(self) -> bool:
        """Whether it is gathered when this one has been freed."""
        return self.backward_prefetch == _AFTER

    @property
    def input_dtype(self) -> torch.dtype | None:
        """What floating-point inputs of the unit are cast to, if anything."""
        precision = self.mixed_precision
        return precision.param_dtype if precision.cast_forward_inputs else None
