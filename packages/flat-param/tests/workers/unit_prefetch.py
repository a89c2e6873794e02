"""Lists of units that are gathered early: when, how often, and with the same gradients."""

from __future__ import annotations

import random

import torch
from _harness import batches, loss_of, plain, raises, same_bits, sharded, share, whole_state
from _whole import whole_bytes, whole_grads
from torch import Tensor, nn

import flat_param
from flat_param import fully_shard
from flat_param.plan import CommCount


def _step(model: nn.Module, ids: Tensor, rank: int) -> tuple[int, dict[str, Tensor]]:
    """Gathers and gradients of a step."""
    model.zero_grad()
    model.comm_counts()
    loss_of(model, share(ids, rank)).backward()
    gathers = model.comm_counts().get("all_gather", CommCount()).calls
    assert whole_bytes(model) == 0
    return gathers, whole_grads(model)


def _seen(model: nn.Module, ids: Tensor, rank: int) -> tuple[list[list[int]], list[list[int]]]:
    """Which blocks are gathered as each block computes, in forward and in backward."""
    forward: list[list[int]] = []
    backward: list[list[int]] = []
    units = [block._flat_param for block in model.blocks]

    def note(seen: list[list[int]]) -> None:
        seen.append([index for index, unit in enumerate(units) if unit.is_gathered])

    hooks = []
    for block in model.blocks:
        hooks.append(block.register_forward_pre_hook(lambda *_: note(forward)))
        hooks.append(block.down.register_full_backward_hook(lambda *_: note(backward)))
    _step(model, ids, rank)
    for hook in hooks:
        hook.remove()
    return forward, backward


def check_lists_change_when_and_not_what_is_gathered(rank: int, world: int) -> None:
    """From the first step on; as often as without; the default comes back with an empty list."""
    (ids,) = batches(world, 1)
    model = sharded()
    usual = _step(sharded(), ids, rank)
    first, second, third = model.blocks
    model.set_modules_to_forward_prefetch([first, second, third])
    first.set_modules_to_forward_prefetch([third])
    model.set_modules_to_backward_prefetch([third, first])
    third.set_modules_to_backward_prefetch([first])
    for _ in range(2):
        gathers, grads = _step(model, ids, rank)
        assert gathers == usual[0]
        same_bits(grads, usual[1])
    forward, backward = _seen(model, ids, rank)
    assert forward == [[0, 1, 2], [1, 2], [2]]
    assert backward == [[0, 2], [0, 1], [0]]
    model.set_modules_to_forward_prefetch([])
    first.set_modules_to_forward_prefetch([])
    model.set_modules_to_backward_prefetch([])
    third.set_modules_to_backward_prefetch([])
    forward, backward = _seen(model, ids, rank)
    assert (forward, backward) == ([[0, 1], [1, 2], [2]], [[1, 2], [0, 1], [0]])


class _Routes(nn.Module):
    """Runs the layers that are asked for; the loss may go through some of them alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor, route: list[int], cut: int | None) -> Tensor:
        for place, index in enumerate(route):
            x = x + torch.tanh(self.layers[index](x if place != cut else x.detach()))
        return x


def check_lists_of_any_order_are_right(rank: int, world: int) -> None:
    """Random lists, routes and cuts, where one rank's loss leaves units out, too."""
    dice = random.Random(0)
    x = torch.linspace(-1, 1, 8 * world).view(2 * world, 4)
    model, usual = _Routes(), _Routes()
    for module in (model, usual):
        for layer in module.layers:
            fully_shard(layer)
        fully_shard(module)
    for trial in range(12):
        for module in (model, *model.layers):
            others = [layer for layer in model.layers if layer is not module]
            for say in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
                getattr(module, say)(dice.choices(others, k=dice.randrange(5)))
        route = dice.choices(range(5), k=4) if trial % 2 else dice.sample(range(5), 5)
        cut, keeps = dice.choice([None, 1, 2]), dice.random() < 0.5
        counts, grads, sizes = [], [], []
        for module in (model, usual):
            module.zero_grad()
            module.set_reshard_after_forward(not keeps)
            module.comm_counts()
            out = module(share(x, rank), route, cut if rank else None)
            sizes.append(whole_bytes(module))
            out.square().mean().backward()
            counts.append(module.comm_counts())
            grads.append(whole_grads(module))
            assert whole_bytes(module) == 0
        same_bits(*grads, trial, route, cut)
        if len(set(route)) == 5:
            assert sizes[0] <= sizes[1], (trial, route, cut)
            assert counts[0] == counts[1], (trial, route, cut)


def check_units_listed_and_not_used_are_freed(rank: int, world: int) -> None:
    """They are gathered for nothing, once, and are right when they are used."""
    x = torch.linspace(-1, 1, 8 * world).view(2 * world, 4)
    model = _Routes()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.set_modules_to_forward_prefetch([model.layers[3]])
    model.layers[0].set_modules_to_forward_prefetch([model.layers[3]])
    for _ in range(2):
        model.comm_counts()
        loss = model(share(x, rank), [0, 1], None).square().mean()
        assert not model.layers[3]._flat_param.is_gathered
        assert model.comm_counts()["all_gather"].calls == 3  # two layers, and one more
        loss.backward()
    with torch.no_grad():
        model.layers[3].bias.add_(1)
        found = model(share(x, rank), [3], None)
        plainly = _Routes()
        plainly.load_state_dict(whole_state(model))
        assert torch.equal(found, plainly(share(x, rank), [3], None))


def check_wrong_lists_are_refused_by_name(rank: int, world: int) -> None:
    """No list, no unit, the unit itself, another tree; what was said before stays."""
    (ids,) = batches(world, 1)
    model, other = sharded(), sharded()
    block = model.blocks[0]
    block.set_modules_to_forward_prefetch([model.blocks[2]])
    before = _seen(model, ids, rank)
    cases = [model.blocks[1], None, [model.blocks[1], plain().head], [block], [other.blocks[1]]]
    for name in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        for modules in cases:
            raises(
                flat_param.StateError,
                f"flat_param.{name}: modules must be a list of other sharded modules below one",
                lambda name=name, modules=modules: getattr(block, name)(modules),
            )
    assert _seen(model, ids, rank) == before
