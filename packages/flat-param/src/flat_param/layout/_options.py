"""The options of a unit, and the dtypes of torch's mixed-precision policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .._errors import LayoutError, StateError
from ._boundary import Boundary

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class UnitOptions:
    """How one unit is sharded.

    Attributes:
        precision: the dtypes. Shards keep the parameters' own dtype.
        boundary: where its parameters may be cut.
        cpu_offload: whether shards are in CPU memory.
        pin_memory: whether those shards are page-locked.
    """

    precision: MixedPrecisionPolicy
    boundary: Boundary
    cpu_offload: bool = False
    pin_memory: bool = False


def precision_of(
    policy: MixedPrecisionPolicy | None, *, where: str = "fully_shard"
) -> MixedPrecisionPolicy:
    """The policy, or torch's default; refuses dtypes in which torch does not compute."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy() if policy is None else policy
    if not isinstance(policy, MixedPrecisionPolicy):
        raise StateError(
            f"flat_param.{where}: mp_policy is {policy!r}, but it must be a policy of torch. "
            "Pass torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=...)."
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        computes = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
        if dtype is not None and not computes:
            raise LayoutError(
                f"flat_param.{where}: {name} of mp_policy is {dtype!r}, but torch computes in "
                "floating point of 16 bits or more. Use torch.bfloat16."
            )
    return policy


def compute_dtype(policy: MixedPrecisionPolicy, dtype: torch.dtype) -> torch.dtype:
    """The dtype of unsharded parameters; only floating point is cast."""
    return policy.param_dtype or dtype if dtype.is_floating_point else dtype


def reduction_dtype(policy: MixedPrecisionPolicy, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of parameters of `dtype` are reduced."""
    if not dtype.is_floating_point:
        return dtype
    return policy.reduce_dtype or compute_dtype(policy, dtype)
