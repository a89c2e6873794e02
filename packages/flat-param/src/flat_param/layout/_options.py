"""The dtypes of a unit, and its other options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .._errors import LayoutError, StateError
from ._boundary import Boundary

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class Precision:
    """The dtypes of torch's `MixedPrecisionPolicy`. Shards keep the parameters' own dtype.

    Attributes:
        param_dtype: of unsharded parameters; None keeps their own.
        reduce_dtype: of gradient reductions over ranks; None means the compute dtype.
        output_dtype: floating-point outputs of the unit are cast to it.
        cast_forward_inputs: cast floating-point inputs of the unit to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the compute dtype of a parameter of `dtype`; only floating point is cast."""
        return self.param_dtype or dtype if dtype.is_floating_point else dtype

    def reduction_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of parameters of `dtype` are reduced."""
        return self.reduce_dtype or self.compute_dtype(dtype) if dtype.is_floating_point else dtype

    @property
    def input_dtype(self) -> torch.dtype | None:
        """Return the dtype to which floating-point inputs are cast; None leaves them."""
        return self.param_dtype if self.cast_forward_inputs else None


def precision_of(policy: MixedPrecisionPolicy | None, *, where: str = "fully_shard") -> Precision:
    """The dtypes of torch's policy."""
    if policy is None:
        return Precision()
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if not isinstance(policy, MixedPrecisionPolicy):
        raise StateError(
            f"flat_param.{where}: mp_policy is {policy!r}, but it must be a policy of torch. "
            "Pass torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=...)."
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and not _can_compute(dtype):
            raise LayoutError(
                f"flat_param.{where}: {name} of mp_policy is {dtype!r}, but torch computes in "
                "floating point of 16 bits or more. Use torch.bfloat16."
            )
    return Precision(
        policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs
    )


def _can_compute(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1


@dataclass(frozen=True)
class UnitOptions:
    """How one unit is sharded.

    Attributes:
        precision: its dtypes.
        boundary: where its parameters may be cut.
        cpu_offload: whether shards are in CPU memory.
        pin_memory: whether those shards are page-locked.
    """

    precision: Precision
    boundary: Boundary
    cpu_offload: bool = False
    pin_memory: bool = False
