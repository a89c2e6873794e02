"""Changes of each block, and ways to distribute a model over ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from _models import Case
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DistributedDataParallel

import flat_param
from ckpt_wrap import checkpoint_, checkpoint_wrapper, offload_
from sac_policies import ATTENTION, MATMULS, context_fn, save_ops


def in_wrappers(case: Case, model: nn.Module) -> None:
    """Replace each block by a wrapper."""
    for name, block in case.blocks_of(model).items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, checkpoint_wrapper(block))


def in_place(change: Callable[[nn.Module], object]) -> Callable[[Case, nn.Module], None]:
    """Change each block in place."""

    def apply(case: Case, model: nn.Module) -> None:
        for block in case.blocks_of(model).values():
            change(block)

    return apply


FOLDER = tempfile.mkdtemp()
LAYERS: dict[str, Callable[[Case, nn.Module], None]] = {
    "none": lambda case, model: None,
    "checkpoint_": in_place(checkpoint_),
    "checkpoint_wrapper": in_wrappers,
    "offload_": in_place(lambda b: offload_(b, to=FOLDER, min_bytes=1)),
    "contexts": in_place(
        lambda b: checkpoint_(b, context_fn=context_fn(save_ops(MATMULS, ATTENTION)))
    ),
}


def ddp(case: Case, model: nn.Module) -> nn.Module:
    """Wrap in DDP, which averages gradients."""
    return DistributedDataParallel(model)


def fsdp(case: Case, model: nn.Module) -> nn.Module:
    """Shard each block and the model with torch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in _blocks(case, model):
        fsdp2(block, mesh=mesh)
    return fsdp2(model, mesh=mesh)


def ours(way: str) -> Callable[[Case, nn.Module], nn.Module]:
    """Shard each block and the model with flat-param."""

    def apply(case: Case, model: nn.Module) -> nn.Module:
        world = dist.get_world_size()
        mesh = init_device_mesh("cpu", (world, 1) if way == "replicated" else (world,))
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": way != "ZeRO-2"}
        for block in _blocks(case, model):
            flat_param.fully_shard(block, **options)
        return flat_param.fully_shard(model, **options)

    return apply


def _blocks(case: Case, model: nn.Module) -> list[nn.Module]:
    """Return the blocks, inner ones first."""
    found = dict(model.named_modules())
    wrapped = [m for m in found.values() if type(m).__name__ == "CheckpointWrapper"]
    return (wrapped or list(case.blocks_of(model).values()))[::-1]


OVER: dict[str, Callable[[Case, nn.Module], nn.Module]] = {
    "ddp": ddp,
    "fsdp2": fsdp,
    "zero3": ours("ZeRO-3"),
    "zero2": ours("ZeRO-2"),
    "replicated": ours("replicated"),
}
