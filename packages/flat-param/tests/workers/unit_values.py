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
from _whole import same_grads, same_step
from torch import Tensor, nn

import flat_param


def check_reassigned_parameter_is_taken_up(rank: int, world: int) -> None:
    """Reassigned parameter is taken up."""
    model, reference = sharded(), plain()
    fresh = torch.full((11, 7), 0.25)
    model.head.weight = nn.Parameter(fresh.clone())
    reference.head.weight = nn.Parameter(fresh.clone())
    (ids,) = batches(world, 1)
    same_step(model, reference, ids, rank)


def _whole(model: nn.Module) -> Tensor:
    with model.whole_params():
        return model.head.weight.detach().clone()


def _saved(model: nn.Module) -> Tensor:
    paths = [tempfile.mkdtemp()]
    dist.broadcast_object_list(paths)
    flat_param.save_sharded(model, paths[0])
    other = sharded(seed=1)
    flat_param.load_sharded(other, paths[0])
    return whole_state(other)["head.weight"]


def _moved(model: nn.Module) -> Tensor:
    return whole_state(model.double().float())["head.weight"]


def check_reassigned_parameter_is_what_everything_reads(rank: int, world: int) -> None:
    """State dict, whole parameters, save and a cast, where a forward has gathered it, too."""
    (ids,) = batches(world, 1)
    fresh = torch.full((11, 7), 0.25)
    readers = (lambda model: whole_state(model)["head.weight"], _whole, _saved, _moved)
    for read in readers:
        for is_gathered in (False, True):
            for by_data in (False, True):
                model = sharded()
                if is_gathered:
                    model(share(ids, rank))  # without a backward
                if by_data:
                    model.head.weight.data = fresh.clone()
                else:
                    model.head.weight = nn.Parameter(fresh.clone())
                assert torch.equal(read(model), fresh)
                expected = {**plain().state_dict(), "head.weight": fresh}
                assert distance(whole_state(model), expected) == 0


def check_loaded_values_replace_what_was_reassigned(rank: int, world: int) -> None:
    """The last one to write is right, as in one process."""
    (ids,) = batches(world, 1)
    model, other = sharded(), sharded()
    state = {key: value.clone() for key, value in whole_state(model).items()}
    model(share(ids, rank))
    model.head.weight = nn.Parameter(torch.full((11, 7), 0.25))
    model.load_state_dict(state)
    assert torch.equal(model(ids), other(ids))


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


def check_value_of_another_dtype_or_of_a_piece_is_taken(rank: int, world: int) -> None:
    """What was read from the module may be put there again, changed; the parameter stays."""
    model, expected = sharded(), torch.arange(77.0).view(11, 7)
    param = model.head.weight
    for dtype in (torch.bfloat16, torch.int64):
        model.head.weight = nn.Parameter(expected.to(dtype), requires_grad=False)
        assert torch.equal(whole_state(model)["head.weight"], expected)
        assert model.head.weight is param
        assert param.requires_grad
    model.head.weight = nn.Parameter(param.detach() + 5)
    assert torch.equal(whole_state(model)["head.weight"], expected + 5)
    assert model.head.weight is param


def check_missing_values_and_other_shapes_are_refused_by_name(rank: int, world: int) -> None:
    """Also one that has as many elements; the parameter is back afterwards."""
    model = sharded()
    (ids,) = batches(world, 1)
    expected = model(ids).detach()

    def put(value: Tensor | None) -> None:
        model.head.weight = None if value is None else nn.Parameter(value)

    for change, shape in (
        (lambda: put(None), "None"),
        (lambda: delattr(model.head, "weight"), "None"),
        (lambda: put(torch.ones(7, 11)), "(7, 11)"),
        (lambda: put(torch.ones(2, 2)), "(2, 2)"),
        (lambda: put(torch.ones(())), "()"),
    ):
        param = model.head.weight
        change()
        text = f"parameter 'head.weight' was re-assigned with shape {shape}, but it was sharded"
        model.comm_counts()
        raises(flat_param.ParameterError, text, lambda: model(ids))
        assert not model.comm_counts(), "an error must come before the first collective"
        assert model.head.weight is param
        assert torch.equal(model(ids), expected)


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
        text = "re-assigned with shape"
        raises(flat_param.ParameterError, text, lambda: model(share(ids, rank)))
        model.head.bias = kept
        model.to(torch.float64 if value == 1 else torch.float32)
        if rank == 0:
            time.sleep(0.8)  # longer than a rank waits before it looks for notices
        loss_of(model, share(ids, rank)).backward()
    assert model.head.bias.grad.dtype == torch.float32


if __name__ == "__main__":
    run_checks(globals())
