"""The adapter of torch's `FullyShardedDataParallel`, which wraps a module in another one.

It provides sharded training. Plans, the switches of sharded modules and checkpoint functions are
not provided; its flat parameters are judged as a part of torch's own adapter. Cases shard a module
in place, so the module becomes the wrapper here, and its previous contents move inside.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed import fsdp

from torchparts_conformance import Implementation


class _Sharded(fsdp.FullyShardedDataParallel):
    """The wrapper, with the methods of sharded modules that cases use."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign `forward` to the inner module: the wrapper's forward gathers for it."""
        if name == "forward":
            self.module.forward = value
        else:
            super().__setattr__(name, value)


def _arguments(
    mesh: Any, mp_policy: fsdp.MixedPrecisionPolicy | None, reshard_after_forward: bool
) -> dict[str, Any]:
    """Convert the arguments of `fully_shard` to FSDP1's."""
    kinds = fsdp.ShardingStrategy
    found: dict[str, Any] = {
        "sharding_strategy": kinds.FULL_SHARD if reshard_after_forward else kinds.SHARD_GRAD_OP,
        "device_mesh": mesh,
    }
    if getattr(mesh, "ndim", 1) == 2:
        shards = mesh.size(1) > 1
        found["sharding_strategy"] = kinds.HYBRID_SHARD if shards else kinds.NO_SHARD
        found["device_mesh"] = mesh if shards else None
    if mp_policy is not None:
        found["mixed_precision"] = fsdp.MixedPrecision(
            param_dtype=mp_policy.param_dtype, reduce_dtype=mp_policy.reduce_dtype
        )
    return found


class _Part:
    """`FullyShardedDataParallel` as this area's part; everything else is not provided."""

    @staticmethod
    def fully_shard(
        module: Any,
        *,
        mesh: Any = None,
        mp_policy: fsdp.MixedPrecisionPolicy | None = None,
        reshard_after_forward: bool = True,
    ) -> Any:
        """Shard a module; if that raises, the module is unchanged."""
        inner, kind = copy.copy(module), type(module)
        vars(module).clear()
        module.__class__ = _Sharded
        try:
            fsdp.FullyShardedDataParallel.__init__(
                module,
                inner,
                device_id=torch.device("cpu"),
                use_orig_params=True,
                **_arguments(mesh, mp_policy, reshard_after_forward),
            )
        except BaseException:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(vars(inner))
            raise
        return module


def implementation() -> Implementation:
    """Adapt `FullyShardedDataParallel` of the installed torch."""
    return Implementation(
        name="torch FullyShardedDataParallel",
        version=torch.__version__,
        distributions=("torch",),
        parts={"flat-param": _Part()},
        capabilities={"flat-param": frozenset({"distributed"})},
        lacks={
            "flat-param": {
                "FP-004": "its flat parameters are judged with torch",
                "FP-188": "it has no forward methods",
                "FP-189": "it has no_sync but no switch for gradient sync",
                "FP-191": "it has no unshard and reshard of a unit",
            }
        },
    )
