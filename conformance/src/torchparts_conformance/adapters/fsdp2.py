"""The adapter of torch's `fully_shard`, which keeps each parameter as one DTensor.

It provides sharded training. Flat parameters, plans and checkpoint functions are not provided.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchparts_conformance import Implementation


class _Words:
    """The methods of sharded modules that cases use, implemented with those of `fully_shard`."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return full tensors on every rank; collective."""
        state = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        if kwargs.get("destination") is None:
            state.update({name: _whole(tensor) for name, tensor in state.items()})
        return state

    @contextlib.contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        """Accumulate unreduced gradients inside the block."""
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(True)

    def register_forward_method(self: Any, name: str) -> None:
        """Register a method as a forward method."""
        fsdp.register_fsdp_forward_method(self, name)


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _named(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Name the replicate and shard dimensions, as `fully_shard` requires."""
    if mesh is None or mesh.ndim == 1 or mesh.mesh_dim_names:
        return mesh
    return DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=("replicate", "shard"))


class _Part:
    """`fully_shard` as this area's part; everything else is not provided."""

    @staticmethod
    def fully_shard(
        module: nn.Module,
        *,
        mp_policy: fsdp.MixedPrecisionPolicy | None = None,
        mesh: Any = None,
        reshard_after_forward: bool | int = True,
    ) -> nn.Module:
        """Shard a module."""
        policy: dict[str, Any] = {} if mp_policy is None else {"mp_policy": mp_policy}
        fsdp.fully_shard(
            module, mesh=_named(mesh), reshard_after_forward=reshard_after_forward, **policy
        )
        kind = type(module)
        module.__class__ = type(kind.__name__, (_Words, kind), {})
        return module


def implementation() -> Implementation:
    """Adapt `fully_shard` of the installed torch."""
    return Implementation(
        name="torch fully_shard",
        version=torch.__version__,
        distributions=("torch",),
        parts={"flat-param": _Part()},
        capabilities={"flat-param": frozenset({"distributed"})},
        lacks={
            "flat-param": {
                "FP-004": "it has no flat parameters",
            }
        },
    )
