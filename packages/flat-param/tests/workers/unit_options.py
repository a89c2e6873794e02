"""What a unit is made from: ranks, meta parameters, options, names, ties; one check per claim."""

from __future__ import annotations

import copy
import pickle
from functools import partial

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
    same_bits,
    sharded,
    share,
    whole_state,
)
from _whole import plain_grads, same_step, whole_grads
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import flat_param
from flat_param import fully_shard


def check_ranks_come_from_a_mesh_or_a_group(rank: int, world: int) -> None:
    """One axis of a mesh is all ranks here; a group of one rank divides nothing."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    groups = [dist.new_group([each]) for each in range(world)]
    (ids,) = batches(world, 1)
    same_step(sharded(mesh=mesh), plain(), ids, rank)
    alone_reference = plain()
    loss_of(alone_reference, share(ids, rank)).backward()
    alone = sharded(mesh=DeviceMesh.from_group(groups[rank], "cpu"))
    loss_of(alone, share(ids, rank)).backward()
    assert not alone.comm_counts()
    assert distance(whole_grads(alone), plain_grads(alone_reference)) == 0


def check_meta_init_equals_plain_init(rank: int, world: int) -> None:
    """Meta init equals plain init."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    torch.manual_seed(3)
    fully_shard(model)
    torch.manual_seed(3)
    reference = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    same_bits(whole_state(model), whole_state(reference))


def check_bad_calls_are_refused_before_anything_changes(rank: int, world: int) -> None:
    """Bad calls are refused before anything changes."""
    model = sharded()
    raises(flat_param.StateError, "sharded already", lambda: fully_shard(model))
    for copies in (copy.deepcopy, copy.copy, pickle.dumps):
        raises(flat_param.StateError, "cannot be copied or pickled", lambda c=copies: c(model))
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1, world))
    raises(flat_param.StateError, "mesh has 3 axes", lambda: sharded(mesh=mesh))


def check_part_of_a_unit_is_refused_by_name(rank: int, world: int) -> None:
    """On all ranks, also on one that holds nothing of it; the unit around it goes on."""
    model = fully_shard(nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)))
    inside = "parameter '0.weight' is sharded by fully_shard, as '0.0.weight' of the outermost unit"
    raises(flat_param.ParameterError, inside, lambda: fully_shard(model[0]))
    model(torch.ones(2, 4)).sum().backward()
    assert type(model[0]) is nn.Sequential


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


def tied_layers() -> nn.Sequential:
    """Two layers of one weight."""
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in "ab"))
    layers[1].weight = layers[0].weight
    return layers


def check_weights_tied_to_a_unit_beside_are_refused_by_name(rank: int, world: int) -> None:
    """By `fully_shard` and `flatten`, before anything is changed."""
    for way in WAYS:
        model = tied_layers()
        fully_shard(model[0], **options_of(way))
        before = model[1].weight
        for move in (partial(fully_shard, **options_of(way)), flat_param.flatten):
            text = "parameter 'weight' is sharded by fully_shard, as 'weight' of "
            raises(flat_param.ParameterError, text, partial(move, model[1]))
            text = "tied parameters with their common parent"
            raises(flat_param.ParameterError, text, partial(move, model[1]))
        assert type(model[1]) is nn.Linear
        assert model[1].weight is model[0].weight is before
