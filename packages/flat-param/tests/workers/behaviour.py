"""What sharded modules do beyond plain training steps; one check per claim."""

from __future__ import annotations

import copy
import gc
import pickle
import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _harness import (
    STRATEGIES,
    Block,
    Model,
    batches,
    distance,
    loss_of,
    main,
    plain,
    raises,
    run_checks,
    sharded,
    share,
)
from _whole import plain_grads, whole_bytes, whole_grads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flat_param
from flat_param import MixedPrecision, fully_shard


def leaf_ids(model: nn.Module) -> list[int]:
    """Which objects the whole parameters are."""
    parts = [part for unit in model._flat_param.schedule.units for part in unit.parts]
    return [id(leaf) for part in parts for leaf in part.leaves]


def note_bytes(seen: list[int], model: nn.Module, *_: Any) -> None:
    """A hook that notes how much is whole."""
    seen.append(whole_bytes(model))


def check_no_sync_accumulates_and_stays_silent(rank: int, world: int) -> None:
    """No sync accumulates and stays silent."""
    for strategy in STRATEGIES:
        reference, model = plain(), sharded(strategy=strategy)
        inputs = batches(world)
        for ids in inputs:
            loss_of(reference, ids).backward()
        with model.no_sync():
            loss_of(model, share(inputs[0], rank)).backward()
            model.comm_counts()
            loss_of(model, share(inputs[1], rank)).backward()
            counts = model.comm_counts()
        assert all(param.grad is None for param in model.parameters())
        expected = {"all_gather"} if strategy == "FULL_SHARD" else set()
        assert set(counts) == expected, (strategy, counts)
        loss_of(model, share(inputs[2], rank)).backward()
        assert distance(whole_grads(model), plain_grads(reference)) < 1e-6


def check_gradients_add_up_until_they_are_cleared(rank: int, world: int) -> None:
    """Gradients add up until they are cleared."""
    reference, model = plain(), sharded()
    for ids in batches(world):
        loss_of(reference, ids).backward()
        loss_of(model, share(ids, rank)).backward()
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6


def check_one_forward_two_backwards(rank: int, world: int) -> None:
    """One forward two backwards."""
    reference, model = plain(), sharded()
    (ids,) = batches(world, 1)
    for module, part in ((reference, ids), (model, share(ids, rank))):
        loss = loss_of(module, part)
        loss.backward(retain_graph=True)
        loss.backward()
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6


def check_two_forwards_one_backward(rank: int, world: int) -> None:
    """Two forwards one backward."""
    reference, model = plain(), sharded()
    first, second, _ = batches(world)
    (loss_of(reference, first) + loss_of(reference, second)).backward()
    (loss_of(model, share(first, rank)) + loss_of(model, share(second, rank))).backward()
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6


def check_layer_unused_on_one_rank_gets_the_mean_with_zero(rank: int, world: int) -> None:
    """Layer unused on one rank gets the mean with zero."""
    for strategy in STRATEGIES:
        reference, model = plain(), sharded(strategy=strategy)
        (ids,) = batches(world, 1)

        def loss(module: Any, part: Tensor, *, skip: bool) -> Tensor:
            x = module.embed(part)
            for index, block in enumerate(module.blocks):
                out = block(x)
                x = x if skip and index == 1 else out
            return module.head(x).square().mean()

        model.forward = partial(loss, model, skip=rank == 1)
        for other in range(world):
            (loss(reference, share(ids, other), skip=other == 1) / world).backward()
        model(share(ids, rank)).backward()
        assert distance(whole_grads(model), plain_grads(reference)) < 1e-6, strategy
        assert model.blocks[1].up.weight.grad is not None


def check_activation_checkpointing_inside_and_around_units(rank: int, world: int) -> None:
    """Activation checkpointing inside and around units."""
    reference, model = plain(), sharded()
    (ids,) = batches(world, 1)
    loss_of(reference, ids).backward()

    def forward(part: Tensor) -> Tensor:
        x = model.embed(part) * model.scale
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return model.head(x)

    model.forward = forward
    loss_of(model, share(ids, rank)).backward()
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6
    inner = sharded()
    for block in inner.blocks:
        block.forward = lambda x, block=block: checkpoint(
            Block.forward, block, x, use_reentrant=False
        )
    loss_of(inner, share(ids, rank)).backward()
    assert distance(whole_grads(inner), plain_grads(reference)) < 1e-6


def check_memory_of_whole_parameters_is_given_back(rank: int, world: int) -> None:
    """Memory of whole parameters is given back."""
    (ids,) = batches(world, 1)
    for strategy in STRATEGIES:
        model = sharded(strategy=strategy)
        assert whole_bytes(model) == 0
        with torch.no_grad():
            model(share(ids, rank))
        assert whole_bytes(model) == 0, strategy
        loss_of(model, share(ids, rank)).backward()
        assert whole_bytes(model) == 0, strategy


def check_peak_of_whole_parameters_is_as_planned(rank: int, world: int) -> None:
    """Peak of whole parameters is as planned."""
    units = flat_param.unit_shapes(plain(), units=Block)
    for strategy in STRATEGIES:
        model, seen = sharded(strategy=strategy), [0]
        note = partial(note_bytes, seen, model)
        for module in model.blocks.modules():
            module.register_forward_hook(note)
            module.register_full_backward_hook(note)
        for ids in batches(world, 2):
            loss_of(model, share(ids, rank)).backward()
        plan = flat_param.plan_training(units, world_size=world, strategy=strategy)
        assert max(seen) == plan.rank_bytes.whole_params_peak, (strategy, max(seen), str(plan))


def check_leaves_are_made_once(rank: int, world: int) -> None:
    """Leaves are made once."""
    model = sharded()
    before = leaf_ids(model)
    for ids in batches(world):
        loss_of(model, share(ids, rank)).backward()
    assert leaf_ids(model) == before


def check_module_is_collected(rank: int, world: int) -> None:
    """A module nobody refers to is given back, with its units."""
    model = sharded()
    loss_of(model, share(next(iter(batches(world))), rank)).backward()
    units = [weakref.ref(unit) for unit in model._flat_param.schedule.units]
    del model
    gc.collect()
    assert [unit() for unit in units] == [None] * len(units)


def check_mixed_precision_computes_low_and_keeps_high(rank: int, world: int) -> None:
    """Mixed precision computes low and keeps high."""
    seen: list[torch.dtype] = []
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, reference = sharded(mixed_precision=precision), plain()
    model.blocks[0].up.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    loss_of(reference, ids).backward()
    assert seen == [torch.bfloat16]
    assert model.blocks[0].up.weight.dtype == torch.float32
    assert model.blocks[0].up.weight.grad.dtype == torch.float32
    assert distance(whole_grads(model), plain_grads(reference)) < 0.05


def check_reduce_dtype_and_inputs_are_as_asked(rank: int, world: int) -> None:
    """Each setting alone: sums in another dtype, and inputs left as they come."""
    (ids,) = batches(world, 1)
    for dtype, error in ((torch.float64, 1e-6), (torch.bfloat16, 0.05), (torch.float16, 0.01)):
        model, reference = sharded(mixed_precision=MixedPrecision(reduce_dtype=dtype)), plain()
        loss_of(model, share(ids, rank)).backward()
        loss_of(reference, ids).backward()
        assert {grads.dtype for grads in model._flat_param.grads} == {dtype}
        assert model.head.weight.grad.dtype == torch.float32
        assert distance(whole_grads(model), plain_grads(reference)) < error, dtype
    for cast in (True, False):
        seen: list[torch.dtype] = []
        layer = nn.Linear(3, 2)
        fully_shard(layer, mixed_precision=MixedPrecision(torch.bfloat16, cast_forward_inputs=cast))
        layer.forward = lambda x, seen=seen: seen.append(x.dtype)
        layer(torch.ones(2, 3))
        assert seen == [torch.bfloat16 if cast else torch.float32]


def check_ranks_come_from_a_mesh_or_a_group(rank: int, world: int) -> None:
    """One axis of a mesh is all ranks here; a group of one rank divides nothing."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    groups = [dist.new_group([each]) for each in range(world)]
    (ids,) = batches(world, 1)
    reference, alone_reference = plain(), plain()
    loss_of(reference, ids).backward()
    loss_of(alone_reference, share(ids, rank)).backward()
    model = sharded(mesh=mesh)
    loss_of(model, share(ids, rank)).backward()
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6
    alone = sharded(process_group=groups[rank])
    loss_of(alone, share(ids, rank)).backward()
    assert not alone.comm_counts()
    assert distance(whole_grads(alone), plain_grads(alone_reference)) == 0


def check_units_nest_three_deep(rank: int, world: int) -> None:
    """A layer in a block in the model, each a unit with parameters of its own."""
    reference, model = plain(), plain()
    for block in model.blocks:
        fully_shard(block.up)
        fully_shard(block)
    fully_shard(model)
    assert len(model._flat_param.schedule.units) == 7
    for ids in batches(world):
        loss_of(reference, ids).backward()
        loss_of(model, share(ids, rank)).backward()
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6


def check_low_precision_grads_are_kept_on_request(rank: int, world: int) -> None:
    """Low precision grads are kept on request."""
    precision = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    model = sharded(mixed_precision=precision)
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    assert model.head.weight.grad.dtype == torch.bfloat16


def check_mistake_of_all_ranks_can_be_mended(rank: int, world: int) -> None:
    """Every rank refuses the same shape, mends it, casts alike, and trains on while one is slow."""
    model = sharded()
    (ids,) = batches(world, 1)
    kept = model.head.bias
    for value in (1, 2):
        model.head.bias = nn.Parameter(torch.zeros(value))
        with pytest.raises(flat_param.ParameterError, match="re-assigned with shape"):
            model(share(ids, rank))
        model.head.bias = kept
        model.to(torch.float64 if value == 1 else torch.float32)
        if rank == 0:
            time.sleep(0.8)  # longer than a rank waits before it looks for notices
        loss_of(model, share(ids, rank)).backward()
    assert model.head.bias.grad.dtype == torch.float32


def check_input_used_in_many_steps_is_hooked_once(rank: int, world: int) -> None:
    """A leaf that is the input of 100 steps, with and without backward, has one hook a unit."""
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(3, 3)), nn.Linear(3, 2)))
    x = torch.ones(2, 3, requires_grad=True)
    for step in range(100):
        out = model(x).sum()
        if step % 2:
            out.backward()
        assert len(x._backward_hooks) == 2
    del model, out
    gc.collect()
    assert all(hook.args[0]() is None for hook in x._backward_hooks.values())


def check_frozen_weights_stay_until_the_last_input_has_its_gradient(rank: int, world: int) -> None:
    """A trained bias is done before the frozen weights are, in a second backward too."""
    models = [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        for name, param in model.named_parameters():
            param.requires_grad_(name == "1.bias")
    fully_shard(models[1])
    inputs = [torch.ones(2, 3, requires_grad=True) for _ in models]
    for model, x in zip(models, inputs, strict=True):
        out = model(x).square().sum()
        out.backward(retain_graph=True)
        out.backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)


def check_frozen_segments_have_no_gradient_memory_or_traffic(rank: int, world: int) -> None:
    """Frozen segments have no gradient memory or traffic."""
    model = plain()
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith("head"))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    counts = model.comm_counts()
    assert counts["reduce_scatter"].calls == 1
    assert all(not block._flat_param.grads for block in model.blocks)
    assert model.blocks[0].up.weight.grad is None
    assert model.head.weight.grad is not None


def check_frozen_layers_pass_gradients_through(rank: int, world: int) -> None:
    """Frozen layers pass gradients through."""
    reference = plain()
    models = [reference, plain()]
    for model in models:
        for name, param in model.named_parameters():
            param.requires_grad_("down" in name or "embed" in name)
    model = models[1]
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    (ids,) = batches(world, 1)
    loss_of(reference, ids).backward()
    loss_of(model, share(ids, rank)).backward()
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6


def check_whole_params_can_be_read_and_written(rank: int, world: int) -> None:
    """Whole params can be read and written."""
    model, reference = sharded(), plain()
    with model.whole_params(write_back=True), torch.no_grad():
        assert model.head.weight.shape == (11, 7)
        assert torch.equal(model.head.weight, reference.head.weight)
        model.head.weight.mul_(2)
    assert torch.equal(model.state_dict()["head.weight"], 2 * reference.head.weight)


def check_clipping_knows_all_ranks(rank: int, world: int) -> None:
    """Clipping knows all ranks."""
    (ids,) = batches(world, 1)
    for norm_type in (1.0, 2.0, float("inf")):
        reference, model, other = plain(), sharded(), sharded(strategy="NO_SHARD")
        loss_of(reference, ids).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)
        for module in (model, other):
            loss_of(module, share(ids, rank)).backward()
            got = module.clip_grad_norm_(0.1, norm_type)
            assert torch.allclose(got, expected, rtol=1e-5), (norm_type, got, expected)
            assert distance(whole_grads(module), plain_grads(reference)) < 1e-6


def check_torch_clipping_is_right_on_shards(rank: int, world: int) -> None:
    """Torch clipping is right on shards."""
    (ids,) = batches(world, 1)
    reference, model = plain(), sharded()
    loss_of(reference, ids).backward()
    loss_of(model, share(ids, rank)).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    got = nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
    assert torch.allclose(got, expected, rtol=1e-5)
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6


def check_meta_init_equals_plain_init(rank: int, world: int) -> None:
    """Meta init equals plain init."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    torch.manual_seed(3)
    fully_shard(model)
    torch.manual_seed(3)
    reference = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    state = model.state_dict()
    assert all(torch.equal(state[k], v) for k, v in reference.state_dict().items())


def check_meta_init_without_reset_is_refused(rank: int, world: int) -> None:
    """Meta init without reset is refused."""
    with torch.device("meta"):
        model = plain()
    raises(flat_param.ParameterError, "reset_parameters", lambda: fully_shard(model))


def check_first_rank_can_speak_for_all(rank: int, world: int) -> None:
    """First rank can speak for all."""
    model = fully_shard(plain(seed=rank), sync_module_states=True)
    assert distance(model.state_dict(), plain(seed=0).state_dict()) == 0


def check_optimizer_made_before_still_trains(rank: int, world: int) -> None:
    """Optimizer made before still trains."""
    model, reference = plain(), plain()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    fully_shard(model)
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    loss_of(reference, ids).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert distance(model.state_dict(), reference.state_dict()) < 1e-6


def check_reassigned_parameter_is_taken_up(rank: int, world: int) -> None:
    """Reassigned parameter is taken up."""
    model, reference = sharded(), plain()
    fresh = torch.full((11, 7), 0.25)
    model.head.weight = nn.Parameter(fresh.clone())
    reference.head.weight = nn.Parameter(fresh.clone())
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    loss_of(reference, ids).backward()
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6
    model.head.weight = nn.Parameter(torch.ones(2, 2))
    model.comm_counts()
    raises(flat_param.ParameterError, "'head.weight'", lambda: model(share(ids, rank)))
    assert not model.comm_counts(), "an error must come before the first collective"


def check_whole_weights_are_never_older_than_the_last_step(rank: int, world: int) -> None:
    """Whole weights are never older than the last step."""
    (ids,) = batches(world, 1)
    for strategy in STRATEGIES:
        model, reference = sharded(strategy=strategy), plain()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
        loss_of(model, share(ids, rank)).backward()
        loss_of(reference, ids).backward()
        model(share(ids, rank))  # keeps whole parameters for a backward that never comes
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            got, expected = model(ids), reference(ids)
        assert torch.allclose(got, expected, atol=1e-5), strategy


def check_failed_forward_leaves_the_module_usable(rank: int, world: int) -> None:
    """Failed forward leaves the module usable."""
    model, reference = sharded(), plain()
    (ids,) = batches(world, 1)
    hook = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    raises(ZeroDivisionError, "division", lambda: model(share(ids, rank)))
    hook.remove()
    loss_of(model, share(ids, rank)).backward()
    loss_of(reference, ids).backward()
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6


def check_failed_backward_leaves_the_module_usable(rank: int, world: int) -> None:
    """Failed backward leaves the module usable."""
    model, reference = sharded(), plain()
    (ids,) = batches(world, 1)

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError("on purpose")

    x = model(share(ids, rank))
    x.register_hook(fail)
    raises(ZeroDivisionError, "on purpose", x.sum().backward)
    loss_of(model, share(ids, rank)).backward()
    loss_of(reference, ids).backward()
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6


def check_dtype_change_is_followed(rank: int, world: int) -> None:
    """Dtype change is followed."""
    model, reference = sharded(), plain()
    model.to(torch.float64)
    reference.to(torch.float64)
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    loss_of(reference, ids).backward()
    assert model.head.weight.dtype == torch.float64
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-12


def check_tied_weights_in_one_unit_train(rank: int, world: int) -> None:
    """Tied weights in one unit train."""
    models = [plain(), plain()]
    for model in models:
        model.head.weight = model.embed.weight
    reference, model = models
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    loss_of(reference, ids).backward()
    assert model.head.weight is model.embed.weight
    assert list(model.state_dict()) == list(reference.state_dict())
    got = whole_grads(model)
    assert torch.allclose(got["head.weight"], reference.head.weight.grad, atol=1e-6)


def check_tied_weights_across_units_are_refused_by_name(rank: int, world: int) -> None:
    """Tied weights across units are refused by name."""
    model = plain()
    model.blocks[0].down.bias = model.blocks[2].norm.bias
    fully_shard(model.blocks[0])
    raises(flat_param.ParameterError, "'blocks.2.norm.bias'", lambda: fully_shard(model))
    raises(flat_param.ParameterError, "'blocks.0.down.bias'", lambda: fully_shard(model))


def check_weights_tied_to_a_unit_beside_are_refused_by_name(rank: int, world: int) -> None:
    """A sibling that shares a weight with a unit is refused before anything is changed."""

    def siblings() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in "ab"))
        model[1].weight = model[0].weight
        return model

    for strategy in ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"):
        model, expected = siblings(), siblings()
        fully_shard(model[0], strategy=strategy)
        shape, shard = model[1].weight.shape, partial(fully_shard, strategy=strategy)
        tied = "parameter 'weight' is tied to 'weight' in a unit beside this module"
        for move in (shard, flat_param.flatten):
            raises(flat_param.ParameterError, tied, partial(move, model[1]))
            raises(flat_param.ParameterError, "or shard their common", partial(move, model[1]))
        assert type(model[1]) is nn.Linear
        assert model[1].weight is model[0].weight
        assert model[1].weight.shape == shape
        common = siblings()
        fully_shard(common, strategy=strategy)
        for each in (common, expected):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            each(torch.eye(4)).square().sum().backward()
            optimizer.step()
        assert torch.equal(common.state_dict()["1.weight"], expected[1].weight)


def check_weights_tied_to_a_flattened_module_beside_are_refused_by_name(
    rank: int, world: int
) -> None:
    """As with a unit; around, inside or after a flattened module, sharding goes on."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in "ab"))
    model[1].weight = model[0].weight
    flat_param.flatten(model[0])
    tied = "parameter 'weight' is tied to 'weight' in a flattened module beside this module"
    raises(flat_param.ParameterError, tied, partial(fully_shard, model[1]))
    assert type(model[1]) is nn.Linear
    flat_param.unflatten(model[0])
    fully_shard(model[1])


def check_parameters_that_share_memory_are_refused_by_name(rank: int, world: int) -> None:
    """Two parameters over the same memory are refused, naming both; nothing is changed."""
    model = plain()
    down = model.blocks[0].down
    down.bias = nn.Parameter(down.weight.detach()[0])
    for name in ("'blocks.0.down.weight'", "'blocks.0.down.bias' share memory"):
        raises(flat_param.ParameterError, name, lambda: fully_shard(model))
    assert type(model) is type(plain())


def check_odd_parameters_survive(rank: int, world: int) -> None:
    """Odd parameters survive."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.wave = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
            self.turned = nn.Parameter(torch.arange(12.0).view(3, 4).t())
            self.column = nn.Parameter(torch.arange(12.0).view(4, 3)[:, :2])
            self.index = nn.Parameter(torch.tensor([1, 0]), requires_grad=False)
            self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            wave = torch.view_as_real(self.wave * self.wave)[self.index].sum()
            columns = (self.turned[:, :2] * self.column).sum()
            return x * self.scalar * (wave + columns + self.low.float().sum()) + self.empty.sum()

    reference, model = Odd(), Odd()
    expected = {k: v.clone() for k, v in reference.state_dict().items()}
    fully_shard(model)
    state = model.state_dict()
    assert all(torch.equal(state[k], v) for k, v in expected.items())
    x = torch.ones(2)
    model(x).sum().backward()
    reference(x).sum().backward()
    state = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    for param in model.parameters():
        if param.grad is not None and param.grad.dtype != torch.int64:
            param.data.copy_(param.grad)
    got = model.state_dict()
    assert all(torch.allclose(got[k], v) for k, v in state.items())


def check_plain_state_loads_and_mismatches_are_named(rank: int, world: int) -> None:
    """Plain state loads and mismatches are named."""
    model, other = sharded(), plain(seed=5)
    assert "All keys matched" in str(model.load_state_dict(other.state_dict()))
    assert not model.comm_counts()
    assert distance(model.state_dict(), other.state_dict()) == 0
    state = other.state_dict()
    del state["head.bias"]
    raises(RuntimeError, '"head.bias"', lambda: model.load_state_dict(state))
    wrong = {**other.state_dict(), "embed.weight": torch.zeros(2, 2)}
    raises(flat_param.ParameterError, "'embed.weight'", lambda: model.load_state_dict(wrong))
    assert distance(model.state_dict(), other.state_dict()) == 0


def check_whole_tensor_optimizers_match_one_process_or_refuse(rank: int, world: int) -> None:
    """Whole tensor optimizers match one process or refuse."""
    (ids,) = batches(world, 1)
    kinds: list[Any] = [torch.optim.Adafactor]
    if hasattr(torch.optim, "Muon"):
        kinds.append(torch.optim.Muon)
    for kind in kinds:
        reference, model, cut = plain(), sharded(boundary="tensor"), sharded(boundary="row")
        optimizers = []
        for module, part in ((reference, ids), (model, share(ids, rank)), (cut, share(ids, rank))):
            loss_of(module, part).backward()
            names = {n for n, p in reference.named_parameters() if p.dim() == 2}
            matrices = [p for n, p in module.named_parameters() if n in names]
            optimizers.append(kind(matrices, lr=0.1))
        optimizers[0].step()
        optimizers[1].step()
        assert distance(model.state_dict(), reference.state_dict()) < 1e-5, kind
        before = cut.state_dict()
        raises(flat_param.ParameterError, "boundary='tensor'", optimizers[2].step)
        assert distance(cut.state_dict(), before) == 0


def check_cpu_offload_changes_nothing_on_the_cpu(rank: int, world: int) -> None:
    """Cpu offload changes nothing on the cpu."""
    model, reference = sharded(cpu_offload=True), plain()
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    loss_of(reference, ids).backward()
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6


def check_bad_calls_are_refused_before_anything_changes(rank: int, world: int) -> None:
    """Bad calls are refused before anything changes."""
    model = sharded()
    raises(flat_param.StateError, "sharded already", lambda: fully_shard(model))
    raises(flat_param.StateError, "cannot be copied", lambda: copy.deepcopy(model))
    raises(flat_param.StateError, "cannot be pickled", lambda: pickle.dumps(model))
    raises(flat_param.StateError, "HYBRID_SHARD", lambda: sharded(strategy="HYBRID_SHARD"))
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, world))
    raises(flat_param.StateError, "2 axes", lambda: sharded(mesh=mesh))
    both = {"mesh": mesh, "process_group": dist.group.WORLD}
    raises(flat_param.StateError, "both mesh", lambda: sharded(**both))
    raises(ValueError, "SOME_SHARD", lambda: sharded(strategy="SOME_SHARD"))


def check_init_fn_that_changes_a_parameter_is_refused_by_name(rank: int, world: int) -> None:
    """What was planned is what is sharded."""
    with torch.device("meta"):
        model = nn.Linear(4, 4)

    def freeze(module: nn.Module) -> None:
        module.reset_parameters()
        module.requires_grad_(False)

    raises(
        flat_param.ParameterError,
        "'weight' has shape, dtype and requires_grad ((4, 4), torch.float32, False) after init_fn",
        lambda: fully_shard(model, init_fn=freeze),
    )


def check_class_and_names_stay(rank: int, world: int) -> None:
    """Class and names stay."""
    model = sharded()
    assert isinstance(model, Model)
    assert isinstance(model, flat_param.ShardedModule)
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in plain().named_parameters()]


def run(rank: int, world: int) -> dict[str, str]:
    """All checks."""
    return run_checks(globals(), rank, world)


if __name__ == "__main__":
    main(run)
