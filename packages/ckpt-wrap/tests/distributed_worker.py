"""One process of test_distributed: DDP, FSDP2 and DCP over one or more gloo ranks."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckpt_wrap import ModuleError, checkpoint_, checkpoint_wrapper, offload_, unwrap


class Block(nn.Module):
    """A block worth recomputing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        """Tanh of a linear layer."""
        return torch.tanh(self.linear(x))


LAYERS = {
    "checkpoint_": checkpoint_,
    "offload_": offload_,
    "both": lambda m: offload_(checkpoint_(m)),
    "wrapper": checkpoint_wrapper,
}


def build():
    """Two blocks, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def shard(model):
    """FSDP2 over each block and the model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def wrap(model, layer):
    """Apply the layer to each block."""
    for index in range(len(model)):
        model[index] = LAYERS[layer](model[index])
    return model


def step(model):
    """Run one step; return the full gradients."""
    x = torch.linspace(-1, 1, 16).reshape(2, 8)
    model(x).sum().backward()
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


def check(layer, how, plain):
    """Gradients, names and checkpoint names of one arrangement."""
    if how == "fsdp over":
        model = shard(wrap(build(), layer))
    elif how == "fsdp under":
        model = wrap(shard(build()), layer)
    else:
        model = DistributedDataParallel(wrap(build(), layer))
    inner = model.module if how == "ddp" else model
    expected = step(copy.deepcopy(plain))
    for one, other in zip(expected, step(model), strict=True):
        torch.testing.assert_close(one, other)
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in inner.named_parameters()] == names
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    step(model)  # the weights changed, but not since forward
    saved = get_model_state_dict(model)
    assert sorted(saved) == sorted(plain.state_dict()), list(saved)
    assert sorted(get_optimizer_state_dict(model, optimizer)["state"]) == sorted(names)
    set_model_state_dict(model, saved)
    if how == "fsdp over" and layer == "wrapper":
        check_sharded_wrappers_stay(model)
    if how == "fsdp under" and layer != "wrapper":
        unwrap(inner)
        assert not any(hasattr(type(m), "_ckpt_wrap") for m in inner.modules())


def check_sharded_wrappers_stay(model):
    """Unwrapping a sharded wrapper would break the model, so it raises; the model still works."""
    sentence = (
        "ckpt_wrap.unwrap: module '0' (FSDPCheckpointWrapper) is sharded, but unwrapping would "
        "also remove what gathers its parameters. Unwrap before fully_shard, or use checkpoint_."
    )
    with pytest.raises(ModuleError, match=f"^{re.escape(sentence)}$"):
        unwrap(model)
    step(model)


def every_arrangement(rank, world_size):
    """Check every arrangement; return how many there are."""
    warnings.simplefilter("ignore")
    arrangements = [(layer, how) for layer in LAYERS for how in ("fsdp over", "fsdp under", "ddp")]
    for layer, how in arrangements:
        check(layer, how, build())
    return len(arrangements)
