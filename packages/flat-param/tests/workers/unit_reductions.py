"""How sums over ranks are made, as its user says: beside FSDP2, bit by bit."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _harness import Model, batches, loss_of, plain, raises, same_bits, share, whole_state
from _whole import plain_grads, whole_bytes, whole_grads
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

from flat_param import fully_shard
from flat_param.plan import CommCount


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """Copies, and ranks that divide each; or the latter alone."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts")[-len(shape) :])


def built(shard: Any, **options: Any) -> Model:
    """Two blocks, a unit each, and one around them; FSDP2 shards no scalars."""
    model = plain(depth=2, scalars=False)
    for module in (*model.blocks, model):
        shard(module, **options)
    return model


def by_fsdp2(shape: tuple[int, ...]) -> Model:
    """As FSDP2 has it."""
    model = built(fsdp2, mesh=mesh_of(shape))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    return model


def by_us(shape: tuple[int, ...] | None = None, **options: Any) -> Model:
    """As we have it, with copies where the shape has."""
    return built(fully_shard, **options, **({"mesh": mesh_of(shape)} if shape else {}))


def step(model: nn.Module, rank: int, seed: int) -> None:
    """Forward and backward on this rank's batch."""
    ids = batches(dist.get_world_size(), seed)[-1]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # that returns a view, the head's
        loss_of(model, share(ids, rank)).backward()


def assert_same(theirs: Model, ours: Model) -> None:
    """Gradients are equal, and not zero, but for what was left out."""
    expected, found = plain_grads(theirs), whole_grads(ours)
    assert list(expected) == list(found)
    same = torch.equal if dist.get_world_size() < 3 else torch.allclose  # orders of sums differ
    for name, grad in expected.items():
        assert same(grad, found[name]), name
    assert expected["head.weight"].any()


def have_grads(model: nn.Module) -> bool:
    """Whether any gradient is there on this rank."""
    return any(param.grad is not None for param in model.parameters())


def check_copies_are_summed_when_it_is_said(rank: int, world: int) -> None:
    """A step that leaves copies apart, then one that sums all, twice.

    Copies of parts on two ranks, and copies of the whole.
    """
    for shape in {(world, 1), (1, world), (2, world // 2)} - {(2, 0)}:
        theirs, ours = by_fsdp2(shape), by_us(shape)
        for first in (1, 3):
            for seed in (first, first + 1):
                last = seed > first
                ours.comm_counts()
                for model in (theirs, ours):
                    model.set_requires_all_reduce(last)
                    step(model, rank, seed)
                    assert have_grads(model) == last
                assert ("all_reduce" in ours.comm_counts()) == (last and world > 1)
            assert_same(theirs, ours)
            assert whole_bytes(ours) == 0
            for model in (theirs, ours):
                model.zero_grad()


def check_kept_sums_of_a_layer_that_is_left_out_are_summed(rank: int, world: int) -> None:
    """By the last step, which does not come to it: as after `no_sync`."""
    kept, silent = by_us((world, 1)), by_us((world, 1))
    for seed in (1, 2):
        kept.set_requires_all_reduce(seed == 2)
        silent.set_requires_gradient_sync(seed == 2)
        for model in (kept, silent):
            step(model, rank, seed)
            model.order = (1,)
    expected = whole_grads(silent)
    assert expected["blocks.0.up.weight"].any()
    same_bits(whole_grads(kept), expected)


def check_copies_of_one_unit_are_left_apart(rank: int, world: int) -> None:
    """The others' gradients are there already, as FSDP2's are; then all add up."""
    theirs, ours = by_fsdp2((world, 1)), by_us((world, 1))
    for model in (theirs, ours):
        model.blocks[1].set_requires_all_reduce(False, recurse=False)
        step(model, rank, seed=1)
        assert not have_grads(model.blocks[1])
        assert have_grads(model.blocks[0])
        model.set_requires_all_reduce(True)
        step(model, rank, seed=2)
    assert_same(theirs, ours)


def check_model_without_copies_leaves_nothing_apart(rank: int, world: int) -> None:
    """Gradients come at once."""
    divided = by_us()
    divided.set_requires_all_reduce(False)
    step(divided, rank, 1)
    assert have_grads(divided)


def check_kept_sums_are_dropped(rank: int, world: int) -> None:
    """By `zero_grad`, and by a backward that is stopped: the next gradients are of their step."""
    for drops in ("zero_grad", "stopped"):
        model, usual = (by_us((world, 1)) for _ in range(2))
        model.set_requires_all_reduce(False)
        step(model, rank, 1)
        if drops == "zero_grad":
            model.zero_grad()
        else:
            out = model(torch.zeros(2, 4, dtype=torch.int64))
            out.register_hook(_fails)
            raises(ZeroDivisionError, "stopped", out.sum().backward)
            model.zero_grad()
        model.set_requires_all_reduce(True)
        for each in (model, usual):
            step(each, rank, 2)
        same_bits(whole_grads(model), whole_grads(usual))


def _fails(_: Tensor) -> None:
    raise ZeroDivisionError("stopped")


def check_gradients_that_a_user_keeps_stay(rank: int, world: int) -> None:
    """The objects, and views of them, over later backwards."""
    lower = MixedPrecisionPolicy(torch.bfloat16)
    for options in ({}, {"mp_policy": lower}, {"shape": (world, 1)}):
        model = by_us(**options)
        step(model, rank, 1)
        found = [param.grad for param in model.parameters() if param.grad is not None]
        kept = [each.as_subclass(Tensor) for each in (*found, *[grad.detach() for grad in found])]
        before = [grad.clone() for grad in kept]
        for _ in range(2):
            model.zero_grad()
            step(model, rank, 2)
        assert found
        assert all(map(torch.equal, kept, before))


def check_norm_of_float64_gradients_is_as_exact(rank: int, world: int) -> None:
    """A sum of float32 norms would be off by 1e-8."""
    ids = batches(world, 1)[-1]
    reference, model = plain().double(), fully_shard(plain().double())
    loss_of(reference, ids).backward()
    loss_of(model, share(ids, rank)).backward()
    norm = model.clip_grad_norm_(1.0)
    expected = nn.utils.get_total_norm(
        [p.grad for p in reference.parameters() if p.grad is not None]
    )
    torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)


def check_hook_changes_sums_as_fsdp2s(rank: int, world: int) -> None:
    """Before they are divided, of one unit, once for each sum; and no more when it is said."""
    for shape in ((world,), (world, 1), (1, world)):
        theirs, ours = by_fsdp2(shape), by_us(shape)
        called: list[str] = []
        for name, model in (("theirs", theirs), ("ours", ours)):
            model.blocks[0].set_all_reduce_hook(partial(_halve, called, name))
        for seed in (1, 2):
            for model in (theirs, ours):
                step(model, rank, seed)
            assert_same(theirs, ours)
        assert called == ["theirs", "ours"] * 2
        ours.blocks[0].set_all_reduce_hook(None)
        step(ours, rank, 1)
        assert len(called) == 4


def _halve(called: list[str], name: str, part: Tensor) -> None:
    called.append(name)
    ranks = torch.ones(())
    dist.all_reduce(ranks)  # it may communicate
    part.div_(2 * ranks)


def check_whole_parameters_stay_after_backward_as_fsdp2s(rank: int, world: int) -> None:
    """The next forward gathers nothing; gradients add up; a step in between is computed with."""
    theirs, ours = by_fsdp2((world,)), by_us((world,))
    for model in (theirs, ours):
        model.set_reshard_after_backward(False)
        step(model, rank, 1)
    stays = whole_bytes(ours)
    assert stays > 0 or world == 1
    ours.comm_counts()
    for model in (theirs, ours):
        model.set_reshard_after_backward(True)
        step(model, rank, 2)
    # The head stays from forward to backward; a layer is gathered again for backward.
    assert ours.comm_counts().get("all_gather", CommCount()).calls == (2 if world > 1 else 0)
    assert_same(theirs, ours)
    assert whole_bytes(ours) == 0


def check_values_of_a_step_are_never_stale(rank: int, world: int) -> None:
    """Parameters that stay are gathered again where they have changed."""
    usual, kept = by_us(), by_us()
    kept.set_reshard_after_backward(False)
    for seed in (1, 2, 3):
        for model in (usual, kept):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step(model, rank, seed)
            optimizer.step()
            optimizer.zero_grad()
    same_bits(whole_state(usual), whole_state(kept))
    kept.set_reshard_after_backward(None)
    step(kept, rank, 1)
    assert whole_bytes(kept) == 0
    inner = by_us()
    inner.set_reshard_after_backward(False, recurse=False)
    step(inner, rank, 1)
    units = [module._flat_param for module in (inner, *inner.blocks)]
    assert [unit.is_unsharded for unit in units] == [True, False, False]
    silent = by_us(reshard_after_forward=False)
    silent.set_reshard_after_backward(True)
    with silent.no_sync():
        step(silent, rank, 1)
    assert whole_bytes(silent) == 0
