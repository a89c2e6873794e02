"""Scenes of flat-param: in one process, and sharded on one rank and on two."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flat_param
from stress.interrupts import Scene, scenario
from stress.models import Stack, backward, differ, gradients, inputs, stack
from stress.ranks import join
from stress.trials import Scenario


def _plain_with(values: dict[str, Tensor]) -> Stack:
    plain = stack()
    plain.load_state_dict(values)
    return plain


def _compare(model: nn.Module) -> str:
    """Compare a normal step with a plain model's with the current values."""
    found = gradients(model, inputs())
    return differ(found, gradients(_plain_with(model.state_dict()), inputs()))


def _flat_step(folder: Path) -> Scene:
    model = stack()
    flat = flat_param.flatten(model)
    average = flat_param.flatten(stack())
    optimizer = torch.optim.AdamW(flat.chunks(64), lr=1e-3)
    x = inputs()

    def act() -> None:
        optimizer.zero_grad()
        backward(model, x)
        flat.clip_(1.0)
        optimizer.step()
        average.lerp_(flat, 0.5)
        flat.zero_grad()

    return Scene(act, lambda: _compare(model))


class _Fresh:
    """A model that is made again before each interrupt."""

    def __init__(self, *, flattened: bool) -> None:
        self.flattened = flattened
        self.values = copy.deepcopy(stack().state_dict())

    def settle(self) -> None:
        self.model = stack()
        if self.flattened:
            flat_param.flatten(self.model)

    def unharmed(self) -> str:
        """Whether it has its values and gradients, unflattened and flattened."""
        return self._same() or self._flattened() or self._same()

    def _same(self) -> str:
        for name, value in self.model.state_dict().items():
            if not torch.equal(value, self.values[name]):
                return f"{name} has other values"
        return _compare(self.model)

    def _flattened(self) -> str:
        if flat_param.flat_params_of(self.model) is None:
            flat_param.flatten(self.model)
        flat_param.unflatten(self.model)
        flat_param.flatten(self.model)
        return ""


def _flatten(folder: Path) -> Scene:
    fresh = _Fresh(flattened=False)
    return Scene(lambda: flat_param.flatten(fresh.model), fresh.unharmed, fresh.settle)


def _unflatten(folder: Path) -> Scene:
    fresh = _Fresh(flattened=True)
    return Scene(lambda: flat_param.unflatten(fresh.model), fresh.unharmed, fresh.settle)


def _states(folder: Path) -> Scene:
    """Save and load state dicts, and make a copy."""
    fresh = _Fresh(flattened=True)

    def act() -> None:
        state = fresh.model.state_dict()
        fresh.model.load_state_dict(state)
        copy.deepcopy(fresh.model)

    return Scene(act, fresh.unharmed, fresh.settle)


def sharded() -> nn.Module:
    """Return a stack in three units."""
    model = stack()
    for block in model.blocks:
        flat_param.fully_shard(block)
    return flat_param.fully_shard(model)


def _gathered(local: list[Tensor | None], like: list[Tensor | None]) -> list[Tensor | None]:
    """Return full gradients from all ranks, in the shapes of `like`; the last is not cut."""
    pieces: list[list[Tensor | None]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(pieces, [None if g is None else _held(g) for g in local])
    found: list[Tensor | None] = []
    for at, whole in enumerate(like[:-1]):
        parts = [each[at] for each in pieces]
        held = [part for part in parts if part is not None and part.numel()]
        if len(held) > 1 and whole is not None and held[0].numel() == whole.numel():
            del held[1:]  # its module was not sharded yet, so every rank has all of it
        found.append(torch.cat(held).view_as(whole) if held and whole is not None else None)
    return [*found, local[-1]]


def _held(piece: Tensor) -> Tensor:
    """Return the elements of this rank as a plain vector."""
    return (piece.to_local() if hasattr(piece, "to_local") else piece).flatten()


def compare_sharded(model: nn.Module) -> str:
    """Compare a sharded model whose ranks share one batch. Collective."""
    values = flat_param.full_state_dict(model)["model"]
    found = gradients(model, inputs())
    expected = gradients(_plain_with(values), inputs())
    return differ(_gathered(found, expected), expected)


def _sharded_scene(kind: str, folder: Path) -> Scene:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, losses = inputs(), list[Tensor]()

    def loss() -> Tensor:
        torch.manual_seed(2)
        return model(x).square().sum()

    def ready() -> None:
        losses[:] = [loss()]

    def accumulate() -> None:
        with model.no_sync():
            loss().backward()
        loss().backward()

    def step() -> None:
        model.clip_grad_norm_(1.0)
        optimizer.step()
        flat_param.full_state_dict(model, optimizer=optimizer)
        model.zero_grad()

    def ready_to_step() -> None:
        model.zero_grad()
        loss().backward()

    acts: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "forward": (loss, lambda: None),
        "backward": (lambda: losses.pop().backward(), ready),
        "accumulate": (accumulate, model.zero_grad),
        "step": (step, ready_to_step),
    }
    act, settle = acts[kind]
    return Scene(act, lambda: compare_sharded(model), settle)


def _sharding(folder: Path) -> Scene:
    """Shard a model; afterwards it works, or an error gives advice."""
    models = [stack()]

    def settle() -> None:
        models[:] = [stack()]

    def act() -> None:
        for block in models[0].blocks:
            flat_param.fully_shard(block)
        flat_param.fully_shard(models[0])

    def wrong() -> str:
        refused: list[bool] = [False] * dist.get_world_size()
        try:
            flat_param.full_state_dict(models[0])
            gradients(models[0], inputs())
        except flat_param.FlatParamError:
            refused[dist.get_rank()] = True
        # Ranks make their pieces separately and may stop after different ones. If a rank refuses,
        # no other rank may wait for it in a collective outside of the part.
        dist.all_gather_object(refused, refused[dist.get_rank()])
        return "" if any(refused) else compare_sharded(models[0])

    return Scene(act, wrong, settle)


def fill(model: nn.Module, value: float) -> None:
    """Set every parameter to this value."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)


def values_in(model: nn.Module) -> set[float]:
    """Return the values of all parameters on all ranks. Collective."""
    state = flat_param.full_state_dict(model)["model"]
    return {value for tensor in state.values() for value in tensor.unique().tolist()}


def leftovers(path: Path, *, killed: bool = False) -> list[str]:
    """Return files other than one checkpoint's; a save that was `killed` leaves its folder."""
    names = sorted(each.name for each in path.iterdir())
    saves = [name for name in names if name.startswith("save-")]
    others = [name for name in names if name not in (*saves, ".metadata")]
    return others if killed or len(saves) == 1 else [*others, *saves]


def _save(folder: Path, *, alone: bool) -> Scene:
    """The path has the old state or the new one, and the next save replaces it.

    If a rank is interrupted alone, the others get an error, and their group is of no more use. So
    each rank leaves its group after an error, as the end of a process does, and all join another.
    """
    path, models = folder / "checkpoint", [sharded(), sharded()]
    rank, world = dist.get_rank(), dist.get_world_size()
    steps, groups = [1], [0]

    def save() -> None:
        fill(models[0], float(steps[0]))
        flat_param.save_sharded(models[0], path, step=steps[0])

    def act() -> None:
        try:
            flat_param.save_sharded(models[0], path, step=steps[0])
        except BaseException:
            if alone:
                dist.destroy_process_group()
            raise

    def start_again() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        groups[0] += 1
        other = folder / f"group-{groups[0]}"
        other.mkdir(exist_ok=True)
        join(other, rank, world)
        models[:] = [sharded(), sharded()]
        gc.collect()  # tracebacks hold the previous group, and so its open files

    def settle() -> None:
        steps[0] += 1
        fill(models[0], float(steps[0]))

    def loaded() -> set[float]:
        flat_param.load_sharded(models[1], path)
        return values_in(models[1])

    def wrong() -> str:
        if alone:
            start_again()
        old, new, found = float(steps[0] - 1), float(steps[0]), loaded()
        if found not in ({old}, {new}):
            return f"the path holds {sorted(found)}, but {old} was saved, and {new} begun"
        dist.barrier()  # all ranks have read
        save()
        dist.barrier()
        if loaded() != {new}:
            return f"after another save of {new} the path does not hold it"
        left = leftovers(path, killed=True)
        return f"left after another save: {left}" if left else ""

    save()
    return Scene(act, wrong, settle)


def _load(folder: Path) -> Scene:
    """The model has its previous values or the stored ones, all of the same kind."""
    path, model = folder / "checkpoint", sharded()
    fill(model, 5.0)
    flat_param.save_sharded(model, path)

    def wrong() -> str:
        found = values_in(model)
        if found not in ({5.0}, {9.0}):
            return f"parameters are {sorted(found)}, but they were 9.0, and 5.0 was loaded"
        flat_param.load_sharded(model, path)
        if values_in(model) != {5.0}:
            return "another load does not give what was stored"
        return compare_sharded(model)

    return Scene(lambda: flat_param.load_sharded(model, path), wrong, lambda: fill(model, 9.0))


def scenarios() -> list[Scenario]:
    local: dict[str, Callable[[Path], Scene]] = {
        "step": _flat_step,
        "flatten": _flatten,
        "unflatten": _unflatten,
        "states": _states,
    }
    found = [scenario(f"flat/{name}", "flat_param", make) for name, make in local.items()]
    on_ranks: dict[str, Callable[[Path], Scene]] = {
        kind: functools.partial(_sharded_scene, kind)
        for kind in ("forward", "backward", "accumulate", "step")
    } | {"fully_shard": _sharding, "load": _load}
    for ranks in (1, 2):
        for name, make in on_ranks.items():
            found.append(scenario(f"flat/{name}-{ranks}", "flat_param", make, ranks=ranks))
        alone = ranks > 1  # only one rank writes metadata
        saved = functools.partial(_save, alone=alone)
        found.append(scenario(f"flat/save-{ranks}", "flat_param", saved, ranks=ranks, alone=alone))
    return found
