"""Parameters that units leave alone, beside FSDP2 and one process; one check per claim."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _harness import options_of, raises, same_bits, whole, whole_state
from _whole import whole_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

import flat_param
from flat_param import ParameterError, fully_shard


class Layer(nn.Module):
    """A scale, and a frozen weight that only a shift uses."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.still = nn.Parameter(torch.randn(width, width), requires_grad=False)
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.sin(self.still @ torch.tanh(self.still @ self.shift))  # last in backward
        return torch.tanh(self.up(x) * self.scale) + shift


class Model(nn.Module):
    """Two layers, and a head that has nothing to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.head = nn.Linear(5, 2)
        self.own = nn.Parameter(torch.full((2,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x))) * self.own


def build() -> Model:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return Model()


def ignored_of(module: nn.Module) -> set[nn.Parameter]:
    """The ignored parameters."""
    return {
        p for n, p in module.named_parameters() if n.split(".")[-1] in ("scale", "shift", "own")
    }


def with_ignored(shard: Any = fully_shard, **options: Any) -> Model:
    """The model with units inside, which say themselves what they ignore."""
    model = build()
    for layer in (model.first, model.second):
        shard(layer, ignored_params=ignored_of(layer), **options)
    return shard(model, ignored_params={model.own}, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, seed: int) -> Tensor:
    """One step on this rank's batch."""
    optimizer.zero_grad()
    torch.manual_seed(10 * seed + rank)
    loss = model(torch.randn(4, 5)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Of all that is trained, ignored or not."""
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)


def check_training_is_fsdp2s(rank: int, world: int) -> None:
    """Weights of three steps, ignored ones as each rank has trained them, by the optimizer too."""
    for way in ("ZeRO-3", "ZeRO-2", "replicated"):
        theirs = with_ignored(fsdp2, mesh=init_device_mesh("cpu", (world,)))
        ours = with_ignored(**options_of(way))
        mine = ignored_of(ours)
        pairs = [(model, optimizer_of(model)) for model in (theirs, ours)]
        for seed in range(3):
            losses = [step(model, optimizer, rank, seed) for model, optimizer in pairs]
            assert torch.equal(*losses)
        assert ignored_of(ours) == mine, "their objects stay"
        found = whole_state(ours)
        same_bits(found, whole(whole_state(theirs)))
        assert whole_bytes(ours) == 0
    if world > 1:
        others: list[Any] = [None] * world
        dist.all_gather_object(others, found["first.scale"])
        assert not torch.equal(others[0], others[1]), "nobody sums their gradients"


def check_gradients_are_one_processes(rank: int, world: int) -> None:
    """Where nothing but an ignored parameter needs whole weights; and with other inputs."""
    for wants_input in (False, True):
        for names in (("up.weight",), ("up.weight", "scale"), ("shift",), ("scale", "shift")):
            grads = []
            for shard in (False, True):
                layer = build().first
                for name, param in layer.named_parameters():
                    param.requires_grad_(name in names)
                if shard:
                    fully_shard(layer, ignored_params={layer.scale, layer.shift})
                x = torch.ones(3, 5, requires_grad=wants_input)
                layer(x).square().sum().backward()
                grads.append([x.grad, layer.scale.grad, layer.shift.grad])
                if shard:
                    assert whole_bytes(layer) == 0
            for expected, found in zip(*grads, strict=True):
                assert (expected is None) == (found is None)
                assert expected is None or torch.equal(expected, found)


def check_nothing_is_done_to_them(rank: int, world: int) -> None:
    """They are not cast, initialised or moved, on meta or not; others are."""
    for is_meta in (False, True):
        layer = build().first
        if is_meta:
            layer.to("meta")
        kept = layer.scale
        with torch.no_grad():
            kept.fill_(rank + 1)
        fully_shard(
            layer,
            ignored_params=[layer.scale, layer.shift],
            init_fn=lambda module: [nn.init.ones_(each) for each in module.parameters(False)],
            mp_policy=MixedPrecisionPolicy(torch.float64),
        )
        assert layer.scale is kept
        assert kept.is_meta == layer.shift.is_meta == is_meta
        if not is_meta:
            assert kept.tolist() == [rank + 1.0] * 5
        else:
            layer.scale, layer.shift = (nn.Parameter(torch.zeros(5)) for _ in range(2))
            assert whole_state(layer)["still"].tolist() == torch.ones(5, 5).tolist()
        layer.forward = lambda x, layer=layer: layer.up(x) * layer.scale
        assert layer(torch.ones(2, 5)).dtype == torch.float64
        assert layer.scale.dtype == torch.float32
        assert layer.up.weight.numel() < 25 or world == 1


def check_one_with_values_beside_meta_tensors_keeps_them(rank: int, world: int) -> None:
    """Its module is initialised."""
    layer = build().first
    kept, before = layer.scale, layer.scale.detach().clone()
    layer.to("meta")
    layer.scale = kept

    def init(module: nn.Module) -> None:
        with torch.no_grad():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.fill_(3.0)

    fully_shard(layer, ignored_params={kept}, init_fn=init)
    assert layer.scale is kept
    assert torch.equal(kept, before)
    assert (whole_state(layer)["up.weight"] == 3).all()


def check_checkpoints_have_them(rank: int, world: int) -> None:
    """Those of the first rank, with their optimizer state, loaded on every rank, by each way."""
    model = with_ignored()
    optimizer = optimizer_of(model)
    step(model, optimizer, rank, 0)
    with torch.no_grad():
        model.own.fill_(rank + 3.0)
    folders: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    flat_param.save_sharded(model, Path(folders[0]) / "saved", optimizer=optimizer)
    state = flat_param.full_state_dict(model, optimizer=optimizer)
    assert state["model"]["own"].tolist() == [rank + 3.0] * 2
    firsts: list[Any] = [state]
    dist.broadcast_object_list(firsts)
    for way in ("sharded", "full"):
        again = with_ignored()
        own, its = again.own, optimizer_of(again)
        if way == "sharded":
            flat_param.load_sharded(again, Path(folders[0]) / "saved", optimizer=its)
        else:
            flat_param.load_full_state_dict(again, firsts[0], optimizer=its)
        assert again.own is own
        assert own.tolist() == [3.0] * 2
        loaded = flat_param.full_state_dict(again, optimizer=its)
        same_bits(loaded["model"], firsts[0]["model"])
        same_bits(loaded["optim"]["state"], firsts[0]["optim"]["state"])
        assert "own" in loaded["optim"]["state"]
    if rank == 0:
        shutil.rmtree(folders[0])


def check_clipping_is_the_same_on_all_ranks(rank: int, world: int) -> None:
    """Ignored gradients count once, those of the rank that has the largest."""
    for order in (2.0, 1.0, float("inf")):
        model = with_ignored()
        torch.manual_seed(rank)
        model(torch.randn(4, 5)).square().mean().backward()
        units = [p.grad for p in model.parameters() if p not in ignored_of(model)]
        mine = [p.grad.clone() for p in ignored_of(model)]
        largest = torch.cat(mine).norm(order)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        wholes = [each.full_tensor().flatten() for each in units if each is not None]
        total = torch.stack([torch.cat(wholes).norm(order), largest]).norm(order)
        norm = model.clip_grad_norm_(float(total) / 2, order)
        assert torch.allclose(norm, total), order
        for param, before in zip(ignored_of(model), mine, strict=True):
            assert torch.allclose(param.grad, before / 2, rtol=1e-4)


def check_one_set_does_for_all_units(rank: int, world: int) -> None:
    """Each takes those that are its own."""
    apart, together = with_ignored(), build()
    given = {*ignored_of(together), nn.Parameter(torch.ones(3, 4))}
    for layer in (together.first, together.second, together):
        fully_shard(layer, ignored_params=given)
    for model in (apart, together):
        step(model, torch.optim.AdamW(model.parameters()), rank, 0)
    same_bits(whole_state(apart), whole_state(together))
    assert ignored_of(together) == given & set(together.parameters())


def check_sharded_ones_are_refused_by_name(rank: int, world: int) -> None:
    """Before anything changes."""
    model = build()
    fully_shard(model.first)
    text = "parameter 'first.scale' is in ignored_params, but another unit has sharded it already"
    raises(ParameterError, text, lambda: fully_shard(model, ignored_params={model.first.scale}))
    assert type(model) is Model


def check_ties_to_ignored_ones_are_refused_by_name(rank: int, world: int) -> None:
    """Ties to parameters sharded around the unit or in another unit, or ignored there."""
    model = build()
    model.own = model.first.scale
    fully_shard(model.first, ignored_params={model.first.scale})
    text = "parameter 'own' is tied to one that a unit inside ignores, but this unit would shard"
    raises(ParameterError, text, lambda: fully_shard(model))
    fully_shard(model, ignored_params={model.own})
    assert model.own is model.first.scale

    model = build()
    model.second.scale = model.first.scale
    fully_shard(model.first, ignored_params={model.first.scale})
    fully_shard(model.second, ignored_params={model.second.scale})
    assert fully_shard(model).second.scale is model.first.scale

    model = build()
    model.second.scale = model.first.scale
    fully_shard(model.first)
    scale = model.second.scale
    text = "parameter 'scale' is in ignored_params, but another unit has sharded it already"
    raises(ParameterError, text, lambda: fully_shard(model.second, ignored_params={scale}))
    text = "parameter 'scale' is sharded by fully_shard, as 'scale' of "
    raises(ParameterError, text, lambda: fully_shard(model.second))
