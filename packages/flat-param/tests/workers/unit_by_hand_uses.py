"""What else is done with a module while units are gathered by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from _harness import (
    batches,
    distance,
    loss_of,
    plain,
    run_checks,
    sharded,
    share,
    whole_state,
)
from _whole import whole_bytes, whole_grads
from torch import Tensor, nn

import flat_param
from flat_param import fully_shard

FOLDER = Path()


def check_everything_else_sees_pieces(rank: int, world: int) -> None:
    """Clipping, clearing, states, loads, casts and whole parameters, while units are whole."""
    first, second = batches(world, 2)
    other = plain(1).state_dict()
    uses: dict[str, Callable[[nn.Module], object]] = {
        "zero_grad": lambda model: model.zero_grad(),
        "clip": lambda model: model.clip_grad_norm_(1e-3),
        "state_dict": whole_state,
        "load": lambda model: model.load_state_dict(other),
        "to": lambda model: model.to(torch.float64).to(torch.float32),
        "whole": lambda model: _double(model),
        "full": lambda model: flat_param.full_state_dict(model),
        "save": lambda model: flat_param.save_sharded(model, FOLDER / "saved"),
        "load_sharded": lambda model: flat_param.load_sharded(model, FOLDER / "saved"),
    }
    found = {}
    for name, use in uses.items():
        for opened in (False, True):
            model = sharded()
            loss_of(model, share(first, rank)).backward()
            for unit in (model, *model.blocks):
                if opened:
                    unit.unshard()
                    unit.get_submodule("head" if unit is model else "up").bias.data.add_(0)
            result = use(model)
            result = result if isinstance(result, Tensor) else torch.zeros(())
            loss_of(model, share(second, rank)).backward()
            found[name, opened] = [result, whole_grads(model), whole_state(model)]
            assert whole_bytes(model) == 0, name
            assert all(param.is_leaf for param in model.parameters())
        (norm, grads, state), (expected, *others) = found[name, True], found[name, False]
        assert torch.equal(norm, expected), name
        assert distance(grads, others[0]) == 0, name
        assert distance(state, others[1]) == 0, name


def _double(model: nn.Module) -> None:
    with model.whole_params(write_back=True):
        for param in model.parameters():
            param.data.mul_(2)


def check_units_around_take_up_what_is_there(rank: int, world: int) -> None:
    """A unit that is made around one that is shown whole has none of its parameters."""
    inner = fully_shard(nn.Linear(4, 4))
    inner.unshard()
    outer = fully_shard(nn.Sequential(inner, nn.Linear(4, 4)))
    assert sorted(len(unit.parts[0].params) for unit in outer._flat_param.schedule.units) == [2, 2]
    outer(torch.ones(1, 4)).sum().backward()
    assert all(param.grad is not None or not param.numel() for param in outer.parameters())


if __name__ == "__main__":
    run_checks(globals())
