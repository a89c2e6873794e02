"""Values and dtypes of a unit, as others read and write them; one check per claim."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from _harness import (
    WAYS,
    batches,
    distance,
    loss_of,
    options_of,
    plain,
    raises,
    sharded,
    share,
    whole_state,
)
from _whole import plain_grads, same_grads, whole_grads
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import flat_param
from flat_param import fully_shard


def check_replaced_parameter_is_refused(rank: int, world: int) -> None:
    """By name, before anything is communicated or written; the sharded parameter is back."""
    model = sharded()
    (ids,) = batches(world, 1)
    param, before = model.head.weight, whole_state(model)
    for uses in (lambda: model(share(ids, rank)), model.state_dict, model.double, model.unshard):
        for value in (nn.Parameter(torch.ones(11, 7)), nn.Parameter(param.detach() + 1), None):
            model.head.weight = value
            model.comm_counts()
            raises(flat_param.ParameterError, "'head.weight' of the outermost unit", uses)
            assert not model.comm_counts()
            assert model.head.weight is param
    param.data = torch.ones(2, 2, 2)
    raises(flat_param.ParameterError, "data of parameter 'head.weight'", model.state_dict)
    assert distance(whole_state(model), before) == 0
    loss_of(model, share(ids, rank)).backward()


def check_values_of_other_memory_are_what_everything_reads(rank: int, world: int) -> None:
    """Set by `param.data = ...`, as some optimizers do, where a forward has gathered it, too."""
    (ids,) = batches(world, 1)
    readers = (whole_state, _full, _saved, _moved)
    expected = plain().state_dict()
    expected["head.weight"] = 2 * expected["head.weight"]
    for read in readers:
        for is_gathered in (False, True):
            model = sharded()
            if is_gathered:
                model(share(ids, rank))  # without a backward
            model.head.weight.data = 2 * model.head.weight.data
            assert distance(read(model), expected) == 0
            assert distance(whole_state(model), expected) == 0


def check_swapped_values_come_back(rank: int, world: int) -> None:
    """Of averages that an evaluation uses: `param.data` keeps the memory that it had."""
    (ids,) = batches(world, 1)
    for way in WAYS:
        reference, model = plain(), sharded(**options_of(way))
        before = whole_state(model)
        old = [param.data for param in model.parameters()]
        for param in model.parameters():
            param.data = param.data * 0.5
        with torch.no_grad():
            model(share(ids, rank))
        for param, values in zip(model.parameters(), old, strict=True):
            param.data = values
        assert distance(whole_state(model), before) == 0
        loss_of(reference, ids).backward()
        loss_of(model, share(ids, rank)).backward()
        same_grads(model, reference)


def _full(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Tensor] = flat_param.full_state_dict(model)["model"]
    return state


def _saved(model: nn.Module) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as path:
        paths = [path]
        dist.broadcast_object_list(paths)
        flat_param.save_sharded(model, paths[0])
        other = sharded(seed=1)
        flat_param.load_sharded(other, paths[0])
        return whole_state(other)


def _moved(model: nn.Module) -> dict[str, Tensor]:
    return whole_state(model.double().float())


def check_parameters_are_frozen_and_trained_again(rank: int, world: int) -> None:
    """Between steps; one that was frozen when it was sharded has no memory for gradients."""
    reference, model = plain(), sharded()
    (ids,) = batches(world, 1)
    for trained in (False, True):
        for module, part in ((reference, ids), (model, share(ids, rank))):
            module.zero_grad()
            module.head.requires_grad_(trained)
            loss_of(module, part).backward()
            assert (module.head.weight.grad is not None) == trained
        same_grads(model, reference)
    other = plain()
    other.head.requires_grad_(False)
    flat_param.fully_shard(other)
    other.head.requires_grad_(True)
    text = "was frozen when it was sharded and is trainable now"
    raises(flat_param.ParameterError, text, lambda: other(ids))


class Writes(nn.Module):
    """Changes a parameter in each forward, as some norms of weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(3, 3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.second.mul_(0.5)
        return x @ self.first @ self.second


def check_write_to_a_parameter_in_forward_is_refused(rank: int, world: int) -> None:
    """It would be lost; a rank that has all of the parameter keeps it."""
    model, x = fully_shard(nn.Sequential(fully_shard(Writes()), nn.Linear(3, 3))), torch.ones(2, 3)
    if world == 1:
        model(x)
        assert whole_state(model)["0.second"].tolist() == [[0.5] * 3] * 3
        return
    text = "parameter 'second' of unit '0' was written to in forward"
    for _ in range(2):
        raises(flat_param.StateError, text, lambda: model(x))
    assert whole_state(model)["0.second"].tolist() == [[1.0] * 3] * 3


def check_head_is_computed_with_after_forward(rank: int, world: int) -> None:
    """Outside of its unit's forward, by a loss that is fused with the last layer."""
    reference, model = plain(), sharded()
    (ids,) = batches(world, 1)
    for module, part in ((reference, ids), (model, share(ids, rank))):
        head = module.head
        hidden: list[Tensor] = []
        handle = head.register_forward_pre_hook(lambda _, args, hidden=hidden: hidden.extend(args))
        module(part)
        handle.remove()
        if module is model:
            model.comm_counts()
            model.unshard()
            assert "all_gather" not in model.comm_counts()
        logits = nn.functional.linear(hidden[0], head.weight, head.bias)
        nn.functional.cross_entropy(logits.flatten(0, 1), part.roll(1, 1).flatten()).backward()
    same_grads(model, reference)


def check_reduce_dtype_and_inputs_are_as_asked(rank: int, world: int) -> None:
    """Each setting alone: sums in another dtype, and inputs left as they come."""
    (ids,) = batches(world, 1)
    for dtype, error in ((torch.float64, 1e-6), (torch.bfloat16, 0.05), (torch.float16, 0.01)):
        model, reference = sharded(mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype)), plain()
        loss_of(model, share(ids, rank)).backward()
        loss_of(reference, ids).backward()
        assert {part.grad_dtype for part in model._flat_param.trained} == {dtype}
        assert model.head.weight.grad.dtype == torch.float32
        assert distance(whole_grads(model), plain_grads(reference)) < error, dtype
    for cast in (True, False):
        seen: list[torch.dtype] = []
        layer = nn.Linear(3, 2)
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=cast))
        layer.forward = lambda x, seen=seen: seen.append(x.dtype)
        layer(torch.ones(2, 3))
        assert seen == [torch.bfloat16 if cast else torch.float32]


def check_dtype_change_is_followed(rank: int, world: int) -> None:
    """Between steps: values and gradients are those of the plain model in the new dtype."""
    model, reference = sharded(), plain()
    (ids,) = batches(world, 1)
    for dtype, error in ((torch.float32, 1e-6), (torch.float64, 1e-12), (torch.float32, 1e-6)):
        for module, part in ((model, share(ids, rank)), (reference, ids)):
            module.zero_grad()
            module.to(dtype)
            loss_of(module, part).backward()
        assert model.head.weight.dtype == model.head.weight.grad.dtype == dtype
        assert distance(whole_grads(model), plain_grads(reference)) < error


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

    for way in WAYS:
        reference, model = Odd(), Odd()
        expected = {k: v.clone() for k, v in whole_state(reference).items()}
        fully_shard(model, **options_of(way))
        state = whole_state(model)
        assert all(torch.equal(state[k], v) for k, v in expected.items())
        x = torch.ones(2)
        model(x).sum().backward()
        reference(x).sum().backward()
        state = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
        for param in model.parameters():
            if param.grad is not None and param.grad.dtype != torch.int64:
                param.data.copy_(param.grad)
        got = whole_state(model)
        assert all(torch.allclose(got[k], v) for k, v in state.items())


def check_sums_over_ranks_stay_in_the_range_of_float16(rank: int, world: int) -> None:
    """The mean is in it, the sum is not; over shards and over copies."""
    for way in ("ZeRO-3", "replicated"):
        layer = nn.Linear(1, 8, bias=False)
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float16)
        fully_shard(layer, mp_policy=precision, **options_of(way))
        (40000 * layer(torch.ones(1, 1))).sum().backward()
        assert torch.equal(whole_grads(layer)["weight"], torch.full((8, 1), 40000.0)), way
