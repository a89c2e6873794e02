"""Parameters that are sent in low precision: one check per claim, against rounding by hand."""

from __future__ import annotations

import copy
import gc
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
    whole_state,
)
from _sent import as_sent
from _whole import plain_grads, whole_bytes, whole_grads
from torch import Tensor, nn

import flat_param
from flat_param import MixedPrecision, Scaled, fully_shard
from flat_param.comm import _scaled_gather
from flat_param.comm._scaled_gather import read_messages
from flat_param.memory import _scaled_values

F32, BF16 = torch.float32, torch.bfloat16
HOW = Scaled(block=16)
FP32_SCALES = Scaled(torch.float8_e5m2, block=24, scale_dtype=F32, min_dims=0)
SENT = MixedPrecision(gather=HOW)


def sent(model: nn.Module, how: Scaled) -> dict[str, Tensor]:
    """By name, what a plain model's parameters compute as."""
    return {
        name: as_sent(param, how) if param.dim() >= how.min_dims else param.detach().clone()
        for name, param in model.named_parameters()
    }


def step_by_hand(model: nn.Module, ids: Tensor, world: int, how: Scaled) -> list[float]:
    """Give a plain model the mean gradient of all ranks at what is sent; their losses."""
    grads: list[dict[str, Tensor | None]] = []
    losses = []
    for rank in range(world):
        rounded = copy.deepcopy(model)
        rounded.zero_grad()
        rounded.load_state_dict(sent(model, how), strict=False)
        loss = loss_of(rounded, share(ids, rank))
        loss.backward()
        losses.append(loss.item())
        grads.append({name: param.grad for name, param in rounded.named_parameters()})
    for name, param in model.named_parameters():
        first, *others = (each[name] for each in grads)
        if first is not None:
            total = first.clone()
            for other in others:
                total += other
            param.grad = total / world
    return losses


def compare(model: Any, rank: int, world: int, how: Scaled) -> None:
    """Three steps beside those by hand: losses, and what the optimizer has, bit by bit."""
    reference = plain()
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, reference)
    ]
    for ids in batches(world):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = step_by_hand(reference, ids, world, how)
        loss = loss_of(model, share(ids, rank))
        loss.backward()
        assert loss.item() == expected[rank], (loss.item(), expected)
        for optimizer in optimizers:
            optimizer.step()
    assert distance(whole_state(model), whole_state(reference)) == 0


@contextmanager
def whole(model: Any) -> Iterator[dict[str, Tensor]]:
    """What a model computes with, gathered by hand."""
    for module in (*model.blocks, model):
        module.unshard()
    yield {name: param.detach() for name, param in model.named_parameters()}
    for module in (*model.blocks, model):
        module.reshard()


def check_every_strategy_trains_as_by_hand(rank: int, world: int) -> None:
    """They differ in what is freed, not in what is computed.

    Without shards gloo sums in an order of its own, which is the ranks' as far as there are two.
    """
    for strategy in STRATEGIES[world > 2 :]:
        compare(sharded(strategy=strategy, mixed_precision=SENT), rank, world, HOW)


def check_float32_scales_and_all_parameters(rank: int, world: int) -> None:
    """Scalars and biases too, in blocks that are no power of two."""
    precision = MixedPrecision(gather=FP32_SCALES)
    compare(sharded(mixed_precision=precision), rank, world, FP32_SCALES)


def check_boundaries_change_nothing(rank: int, world: int) -> None:
    """Nor do schedules, nor offload."""
    rules = flat_param.by_name({"*weight": "row"}, missing_ok=True)
    for boundary in ("row", "tensor", flat_param.Blocks(5), flat_param.Blocks((4, 4)), rules):
        compare(sharded(mixed_precision=SENT, boundary=boundary), rank, world, HOW)
    tiles = Scaled(block=(3, 5), scale_dtype=F32)
    for boundary in ("element", "row", flat_param.Blocks((4, 4)), rules):
        precision = MixedPrecision(gather=tiles)
        compare(sharded(mixed_precision=precision, boundary=boundary), rank, world, tiles)
    for options in (
        {"forward_prefetch": False, "backward_prefetch": False},
        {"reshard_after_forward": False},
        {"reshard_after_forward": max(1, world // 2)},
        {"cpu_offload": True},
    ):
        compare(sharded(mixed_precision=SENT, **options), rank, world, HOW)


def check_whole_parameters_are_those_of_one_process(rank: int, world: int) -> None:
    """On every rank, before and after training; what is written to them is kept."""
    model, reference = sharded(mixed_precision=SENT), plain()
    with whole(model) as found:
        assert distance(found, sent(reference, HOW)) == 0
    (ids,) = batches(world, 1)
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.3)
        if each is reference:
            step_by_hand(reference, ids, world, HOW)
        else:
            loss_of(model, share(ids, rank)).backward()
        optimizer.step()
    with whole(model) as found:
        assert distance(found, sent(reference, HOW)) == 0
        with torch.no_grad():
            found["blocks.1.up.weight"][2, 3] = 0.3
            reference.blocks[1].up.weight[2, 3] = 0.3
    assert distance(whole_state(model), whole_state(reference)) == 0


def check_computing_in_bfloat16(rank: int, world: int) -> None:
    """What arrives is rounded once to the dtype that is computed in; sums may be in another."""
    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=F32, gather=HOW)
    model = sharded(mixed_precision=precision)
    with whole(model) as found:
        expected = {name: values.to(BF16) for name, values in sent(plain(), HOW).items()}
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {F32}


def check_state_is_that_of_full_precision(rank: int, world: int) -> None:
    """State dicts, whole copies, and checkpoints that go both ways."""
    model, reference = sharded(mixed_precision=SENT), plain()
    assert distance(whole_state(model), whole_state(reference)) == 0
    with model.whole_params():
        params = {name: param.detach() for name, param in model.named_parameters()}
        assert distance(params, dict(reference.named_parameters())) == 0
    notes: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(notes)
    for saved, loaded in (({"mixed_precision": SENT}, {}), ({}, {"mixed_precision": SENT})):
        path = f"{notes[0]}/{len(saved)}"
        source, target = sharded(**saved), sharded(seed=1, **loaded)
        flat_param.save_sharded(source, path)
        flat_param.load_sharded(target, path)
        assert distance(whole_state(target), whole_state(reference)) == 0


def check_accumulation(rank: int, world: int) -> None:
    """Inside `no_sync` as outside: two passes of one batch double its gradient."""
    once, twice = sharded(mixed_precision=SENT), sharded(mixed_precision=SENT)
    (ids,) = batches(world, 1)
    loss_of(once, share(ids, rank)).backward()
    with twice.no_sync():
        loss_of(twice, share(ids, rank)).backward()
    loss_of(twice, share(ids, rank)).backward()
    for first, second in zip(once.parameters(), twice.parameters(), strict=True):
        assert (first.grad is None) == (second.grad is None)
        assert first.grad is None or torch.equal(2 * first.grad, second.grad)


class Odd(nn.Module):
    """Tied, frozen, integer, complex, half and empty parameters in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.low = nn.Parameter(torch.randn(6, 6).to(torch.float16))
        self.count = nn.Parameter(torch.arange(6).view(2, 3), requires_grad=False)
        self.turn = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.eight = nn.Parameter(torch.randn(4, 4).to(torch.float8_e5m2), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0, 3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.frozen(self.embed(ids)) @ self.low.to(F32)
        return self.head(x) * self.count.sum() * self.turn.abs().sum() * self.eight.to(F32).sum()


def check_odd_parameters(rank: int, world: int) -> None:
    """Wide floating-point matrices are rounded, others arrive as they are; all get gradients."""
    torch.manual_seed(3)
    reference = Odd()
    model = fully_shard(copy.deepcopy(reference), mixed_precision=SENT)
    rounded = {"embed.weight", "frozen.weight", "low"}
    model.unshard()
    for name, param in model.named_parameters():
        values = reference.get_parameter(name).detach()
        expected = as_sent(values, HOW, values.dtype) if name in rounded else values
        assert torch.equal(param.detach().view(torch.uint8), expected.view(torch.uint8)), name
    assert model.head.weight is model.embed.weight
    model.reshard()
    for name in rounded:
        values = reference.get_parameter(name).detach()
        reference.get_parameter(name).data = as_sent(values, HOW, values.dtype)
    ids = torch.arange(11)
    for each in (model, reference):
        each(ids).square().mean().backward()
    found, expected = whole_grads(model), plain_grads(reference)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert expected["embed.weight"].any()
    assert expected["low"].any()


def check_a_weight_that_is_not_finite_is_seen_everywhere(rank: int, world: int) -> None:
    """Whichever rank has it."""
    model = sharded(mixed_precision=SENT)
    state = whole_state(model)
    state["blocks.0.down.weight"][-1, -1] = torch.inf
    model.load_state_dict(state)
    with whole(model) as found:
        assert found["blocks.0.down.weight"][-1, -1].isnan()
        assert found["blocks.0.down.weight"][0].isfinite().all()
    (ids,) = batches(world, 1)
    assert loss_of(model, share(ids, rank)).isnan()


def check_ranks_that_send_differently_are_told(rank: int, world: int) -> None:
    """Before anything has changed."""
    if world == 1:
        return
    model = plain()
    precision = MixedPrecision(gather=Scaled(block=16 if rank else 32))
    raises(flat_param.CommError, "block=32", lambda: fully_shard(model, mixed_precision=precision))
    assert type(model) is Model


def check_a_device_without_float8_is_refused_on_all_ranks(rank: int, world: int) -> None:
    """Where one rank's torch or device lacks it, none has changed anything."""
    model = plain()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_scaled_values, "can_cast", lambda *_: rank != 0)
        kind = flat_param.ParameterError if rank == 0 else flat_param.CommError
        words = "parameters are on cpu and sent in torch.float8_e4m3fn, but torch"
        raises(kind, words, lambda: fully_shard(model, mixed_precision=SENT))
    assert type(model) is Model


def check_a_cast_of_the_module_is_followed(rank: int, world: int) -> None:
    """Of bfloat16 parameters, what is sent is what they are rounded to."""
    model = sharded(mixed_precision=SENT).to(BF16)
    with whole(model) as found:
        for name, param in plain().to(BF16).named_parameters():
            expected = as_sent(param, HOW, BF16) if param.dim() >= 2 else param
            assert torch.equal(found[name], expected), name


def check_memory_is_as_planned(rank: int, world: int) -> None:
    """Whole parameters, and messages of all ranks: while units compute and as they are read."""
    units = flat_param.unit_shapes(plain(), units=Block)
    tiles = MixedPrecision(gather=Scaled(block=(3, 5)))
    gc.freeze()  # what is there already is not looked through at each module
    for options in (
        {"mixed_precision": SENT},
        {"mixed_precision": SENT, "boundary": "row"},
        {"mixed_precision": SENT, "strategy": "SHARD_GRAD_OP"},
        {"mixed_precision": tiles},
    ):
        plan = flat_param.plan_training(units, world_size=world, **options)
        model, seen = sharded(**options), [0]

        def note(*_: object, model: Any = model, seen: list[int] = seen) -> None:
            alive = (each for each in gc.get_objects() if type(each) is Tensor)
            sent = (each.nbytes for each in alive if each.dtype == torch.uint8 and each.dim() == 2)
            seen.append(whole_bytes(model) + sum(sent))

        def noted(*args: Any, note: Any = note) -> None:
            note()
            read_messages(*args)

        for module in model.blocks.modules():
            module.register_forward_hook(note)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_scaled_gather, "read_messages", noted)
            for ids in batches(world, 2):
                loss_of(model, share(ids, rank)).backward()
        assert max(seen) == plan.rank_bytes.whole_params_peak, (options, max(seen), plan.rank_bytes)
    gc.unfreeze()


def check_compiled_blocks(rank: int, world: int) -> None:
    """Losses and parameters of compiled units are those of eager ones."""
    torch.compiler.reset()
    models = [sharded(mixed_precision=SENT) for _ in range(2)]
    for block in models[0].blocks:
        block.compile(backend="aot_eager")
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for ids in batches(world, 2):
            optimizer.zero_grad()
            loss_of(model, share(ids, rank)).backward()
            optimizer.step()
    assert distance(whole_state(models[0]), whole_state(models[1])) == 0


def run(rank: int, world: int) -> dict[str, str]:
    """All checks."""
    # The compiler looks at `.grad` of everything, and torch warns of that on activations.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    return run_checks(globals(), rank, world)


if __name__ == "__main__":
    main(run)
