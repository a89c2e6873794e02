"""Parameters of a unit that are tied or share memory; one check per claim."""

from __future__ import annotations

from functools import partial

import torch
from _harness import (
    batches,
    loss_of,
    options_of,
    plain,
    raises,
    run_checks,
    share,
    whole_state,
)
from _whole import whole_grads
from torch import nn

import flat_param
from flat_param import fully_shard


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
    assert list(whole_state(model)) == list(whole_state(reference))
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

    for way in ("replicated", "ZeRO-2", "ZeRO-3"):
        model, expected = siblings(), siblings()
        fully_shard(model[0], **options_of(way))
        shape, shard = model[1].weight.shape, partial(fully_shard, **options_of(way))
        tied = "parameter 'weight' is tied to 'weight' in a unit beside this module"
        for move in (shard, flat_param.flatten):
            raises(flat_param.ParameterError, tied, partial(move, model[1]))
            raises(flat_param.ParameterError, "or shard their common", partial(move, model[1]))
        assert type(model[1]) is nn.Linear
        assert model[1].weight is model[0].weight
        assert model[1].weight.shape == shape
        common = siblings()
        fully_shard(common, **options_of(way))
        for each in (common, expected):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            each(torch.eye(4)).square().sum().backward()
            optimizer.step()
        assert torch.equal(whole_state(common)["1.weight"], expected[1].weight)


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


if __name__ == "__main__":
    run_checks(globals())
