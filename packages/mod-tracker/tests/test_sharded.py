"""Tensors that wrap others: shards of DTensors, and parts of quantized tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map

from mod_tracker import profile_flops, profile_memory, watch_memory

RANKS = 4


@pytest.fixture
def mesh():
    """A mesh of four fake ranks; this process is the first."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def sharded(mesh, count=2):
    """Sharded layers, one unit each, and their optimizer."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(count)))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


def test_memory_of_a_sharded_model_is_this_ranks(mesh):
    """A quarter of parameters, gradients and optimizer state."""
    model, optimizer = sharded(mesh)
    part = 2 * 64 * 64 * 4 // RANKS
    with profile_memory(model, optimizer=optimizer) as report:
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
    row = next(iter(report))
    assert (row.parameters, row.gradients) == (part, part)
    assert 2 * part <= row.optimizer <= 2 * part + 16
    assert report.causes["parameters"] == report.causes["gradients"] == part


def test_page_of_a_sharded_model_counts_each_shard_once(mesh):
    model, optimizer = sharded(mesh)
    part = 2 * 64 * 64 * 4 // RANKS
    with watch_memory(model, optimizer=optimizer) as watch:
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        kinds = watch.page().by_kind()
    assert (kinds["parameters"], kinds["gradients"]) == (part, part)
    assert 2 * part <= kinds["optimizer"] <= 2 * part + 16


def test_flops_of_a_sharded_product_are_this_ranks(mesh):
    """Tensor parallelism by columns: a quarter of the FLOPs."""
    weight = distribute_tensor(torch.ones(8, 64), mesh, [Shard(1)])
    x = DTensor.from_local(torch.ones(2, 8), mesh, [Replicate()])
    with profile_flops() as report:
        made = x @ weight
    assert made.to_local().shape == (2, 64 // RANKS)
    assert report.total == 2 * 2 * 8 * 64 // RANKS


class Quantized(torch.Tensor):
    """One-byte integers and a scale, as in torchao."""

    @staticmethod
    def __new__(cls, numbers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)

    def __init__(self, numbers, scale):
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Quantized(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def whole(value):
            return value.numbers * value.scale if isinstance(value, Quantized) else value

        if func is torch.ops.aten.detach.default:
            return Quantized(args[0].numbers, args[0].scale)
        return func(*tree_map(whole, args), **tree_map(whole, kwargs or {}))


def test_quantized_weight_has_the_bytes_of_its_parts():
    layer = nn.Linear(64, 32, bias=False)
    numbers = torch.ones(32, 64, dtype=torch.int8)
    layer.weight = nn.Parameter(Quantized(numbers, torch.ones(32, 1)), requires_grad=False)
    with profile_memory(layer) as memory, profile_flops(layer) as flops:
        layer(torch.ones(2, 64))
    assert memory["Linear"].parameters == 32 * 64 + 32 * 4
    assert flops.total == 2 * 2 * 64 * 32


def test_unsharded_parameters_count_while_allocated(mesh):
    """FSDP2 resizes their storages to zero and back; torch's tracker finds the same peak."""
    from torch.distributed._tools.mem_tracker import MemTracker

    model, optimizer = sharded(mesh, 6)

    def step():
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile_memory(model, optimizer=optimizer) as report:
        step()
    assert "resize_" not in vars(torch.UntypedStorage)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    before = tracker.get_tracker_snapshot("current")[torch.device("cpu")]["Total"]
    with tracker:
        step()
    theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] - before
    assert report["0"].allocated >= 2 * 64 * 64 * 4
    assert report.peak == theirs
