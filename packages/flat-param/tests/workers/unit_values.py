"""Values of a unit as others read and write them; one check per claim."""

from __future__ import annotations

import tempfile
import time

import torch
import torch.distributed as dist
from _harness import (
    batches,
    distance,
    loss_of,
    plain,
    raises,
    run_checks,
    sharded,
    share,
    whole_state,
)
from _whole import same_grads
from torch import Tensor, nn

import flat_param


def check_replaced_parameter_is_refused(rank: int, world: int) -> None:
    """By name, before anything is communicated or written; the sharded parameter is back."""
    model = sharded()
    (ids,) = batches(world, 1)
    param, before = model.head.weight, whole_state(model)
    for uses in (lambda: model(share(ids, rank)), model.state_dict, model.double, model.unshard):
        for value in (nn.Parameter(torch.ones(11, 7)), nn.Parameter(param.detach() + 1), None):
            model.head.weight = value
            model.comm_counts()
            raises(flat_param.ParameterError, "'head.weight' was replaced by a", uses)
            assert not model.comm_counts()
            assert model.head.weight is param
    param.data = torch.ones(2, 2, 2)
    raises(flat_param.ParameterError, "data of parameter 'head.weight'", model.state_dict)
    assert distance(whole_state(model), before) == 0
    loss_of(model, share(ids, rank)).backward()


def check_values_of_other_memory_are_what_everything_reads(rank: int, world: int) -> None:
    """Set by `param.data = ...`, as some optimizers do, where a forward has gathered it, too."""
    (ids,) = batches(world, 1)
    readers = (whole_state, _whole, _saved, _moved)
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


def _whole(model: nn.Module) -> dict[str, Tensor]:
    with model.whole_params():
        return {name: value.clone() for name, value in model.state_dict().items()}


def _saved(model: nn.Module) -> dict[str, Tensor]:
    paths = [tempfile.mkdtemp()]
    dist.broadcast_object_list(paths)
    flat_param.save_sharded(model, paths[0])
    other = sharded(seed=1)
    flat_param.load_sharded(other, paths[0])
    return whole_state(other)


def _moved(model: nn.Module) -> dict[str, Tensor]:
    return whole_state(model.double().float())


def check_plain_state_loads_and_mismatches_are_named(rank: int, world: int) -> None:
    """Plain state loads and mismatches are named."""
    model, other = sharded(), plain(seed=5)
    assert "All keys matched" in str(model.load_state_dict(whole_state(other)))
    assert not model.comm_counts()
    assert distance(whole_state(model), whole_state(other)) == 0
    state = whole_state(other)
    del state["head.bias"]
    raises(RuntimeError, '"head.bias"', lambda: model.load_state_dict(state))
    wrong = {**whole_state(other), "embed.weight": torch.zeros(2, 2)}
    raises(RuntimeError, "'embed.weight'", lambda: model.load_state_dict(wrong))
    assert distance(whole_state(model), whole_state(other)) == 0


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
    text = "parameter 'head.weight' was frozen when it was sharded and is trainable now"
    raises(flat_param.ParameterError, text, lambda: other(ids))


def check_mistake_of_all_ranks_can_be_mended(rank: int, world: int) -> None:
    """Every rank refuses the same shape, mends it, casts alike, and trains on while one is slow."""
    model = sharded()
    (ids,) = batches(world, 1)
    kept = model.head.bias
    for value in (1, 2):
        model.head.bias = nn.Parameter(torch.zeros(value))
        text = "'head.bias' was replaced by a Parameter"
        raises(flat_param.ParameterError, text, lambda: model(share(ids, rank)))
        model.head.bias = kept
        model.to(torch.float64 if value == 1 else torch.float32)
        if rank == 0:
            time.sleep(0.8)  # longer than a rank waits before it looks for notices
        loss_of(model, share(ids, rank)).backward()
    assert model.head.bias.grad.dtype == torch.float32


if __name__ == "__main__":
    run_checks(globals())
