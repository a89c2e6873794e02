"""Options that FSDP2 has too: the same outputs and gradients, bit by bit; one check per claim."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from _harness import options_of, same_bits, whole_state
from _whole import plain_grads, whole_grads
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

from flat_param import fully_shard

LOW = torch.bfloat16


@dataclass(frozen=True)
class Found:
    """What a layer gives: tensors in containers, one of them no floating point."""

    hidden: Tensor
    more: dict[str, Any]
    count: int = field(default=0)


if torch.__version__ < "2.13":  # there FSDP2 finds tensors only where pytree does
    torch.utils._pytree.register_dataclass(Found)


class Layer(nn.Module):
    """One tensor in, nested ones out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 9), nn.Linear(9, 4)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x))

    def forward(self, x: Tensor) -> Found:
        up = torch.tanh(self.up(x))
        return Found(self.down(up), {"up": (up, up.argmax(-1)), "none": None}, 3)


class Model(nn.Module):
    """Two layers and what is around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        first = self.first(x)
        second = self.second(first.hidden)
        self.seen = [first.hidden.dtype, second.more["up"][0].dtype]
        out = self.head(second.hidden.to(self.head.weight.dtype))
        return {"out": out, "layers": [first, second]}


def models(theirs: Any, ours: Any, world: int) -> tuple[Model, Model]:
    """The same weights by FSDP2 and by us, each with `(options of layers, of the model)`."""
    made = []
    for shard, (inner, outer) in ((fsdp2, theirs), (fully_shard, ours)):
        torch.manual_seed(0)
        model = Model()
        mesh = {"mesh": init_device_mesh("cpu", (world,))}
        for layer in (model.first, model.second):
            shard(layer, **mesh, **inner)
        made.append(shard(model, **mesh, **outer))
    return made[0], made[1]


def step(model: Model, rank: int, seed: int = 0) -> list[Tensor]:
    """Forward and backward on this rank's batch; every output."""
    torch.manual_seed(10 * seed + rank)
    found = model(torch.randn(5, 4))
    outputs = [found["out"]]
    for layer in found["layers"]:
        outputs += [layer.hidden, *layer.more["up"]]
    sum(each.float().square().mean() for each in outputs[:3] + outputs[4:6]).backward()
    return [each.detach() for each in outputs]


def assert_same(theirs: Model, ours: Model, rank: int) -> None:
    """Outputs and gradients of a step, then of two steps, are equal and not zero."""
    for seed in (1, 2):
        outputs = step(theirs, rank, seed), step(ours, rank, seed)
        for mine, its in zip(*outputs, strict=True):
            assert mine.dtype is its.dtype
            assert torch.equal(mine, its)
        expected, found = plain_grads(theirs), whole_grads(ours)
        same_bits(found, expected)
        assert all(grad.any() for grad in expected.values())


def check_outputs_are_cast_as_fsdp2_casts_them(rank: int, world: int) -> None:
    """Nested ones, of units inside and of the outermost; what is no floating point stays."""
    for inner, outer in ((torch.float32, torch.float64), (None, torch.float32), (LOW, None)):
        dtypes = [{"param_dtype": LOW, "output_dtype": dtype} for dtype in (inner, outer)]
        for reduced in (None, torch.float32):
            # None is the dtype that is computed in, which from 2.15 on is not FSDP2's default.
            said = {"reduce_dtype": reduced or LOW}
            theirs, ours = models(
                [{"mp_policy": MixedPrecisionPolicy(**each, **said)} for each in dtypes],
                [
                    {"mp_policy": MixedPrecisionPolicy(**each, reduce_dtype=reduced)}
                    for each in dtypes
                ],
                world,
            )
            assert_same(theirs, ours, rank)
            assert ours.seen == theirs.seen == [inner or LOW] * 2


def check_outputs_are_cast_in_methods_and_after_hooks(rank: int, world: int) -> None:
    """A registered method's outputs are; a forward hook sees what forward computed."""
    seen: list[torch.dtype] = []
    layer = fully_shard(Layer(), mp_policy=MixedPrecisionPolicy(LOW, output_dtype=torch.float64))
    layer.register_forward_hook(lambda _, __, out: seen.append(out.hidden.dtype))
    layer.register_forward_method("encode")
    assert layer.encode(torch.ones(2, 4)).dtype == torch.float64
    assert layer(torch.ones(2, 4)).more["up"][0].dtype == torch.float64
    assert seen == [LOW]


def check_sums_are_divided_as_fsdp2_divides_them(rank: int, world: int) -> None:
    """By the factor of each unit alone: sums, other means, and the mean again; in each dtype."""
    for reduced in (torch.float32, LOW, torch.float16, torch.float64):
        if world == 1 and reduced in (torch.float16, torch.float64):
            continue  # one rank of FSDP2 divides twice there
        options = {"param_dtype": LOW, "reduce_dtype": reduced}
        theirs, ours = models(
            [{"mp_policy": MixedPrecisionPolicy(**options)}] * 2,
            [{"mp_policy": MixedPrecisionPolicy(**options)}] * 2,
            world,
        )
        # gloo knows sums alone; of one rank FSDP2 asks for none from 2.11 on
        for unit in (theirs, theirs.first, theirs.second):
            unit.set_force_sum_reduction_for_comms(world > 1 or torch.__version__ < "2.11")
        for inner, outer in ((1.0, 3), (6, 0.5), (float(world), float(world))):
            for model in (theirs, ours):
                model.zero_grad()
                model.first.set_gradient_divide_factor(inner)
                model.set_gradient_divide_factor(outer)
            assert_same(theirs, ours, rank)
    ours.first.set_gradient_divide_factor(1)
    ours.first.set_gradient_divide_factor(None)
    theirs.first.set_gradient_divide_factor(world)
    assert_same(theirs, ours, rank)


def check_accumulated_sums_are_divided_once(rank: int, world: int) -> None:
    """After `no_sync`, in replicas of a mesh and without shards, by what was said last."""
    for options in (options_of("replicated"), {}):
        grads = []
        for factor in (None, 4.0):
            torch.manual_seed(0)
            model = fully_shard(nn.Linear(4, 4), **options)
            with model.no_sync():
                model(torch.full((2, 4), rank + 1.0)).sum().backward()
            model.set_gradient_divide_factor(factor)
            model(torch.full((2, 4), rank + 2.0)).sum().backward()
            grads.append(whole_grads(model)["weight"])
        assert torch.equal(grads[0] * world, grads[1] * 4)


class Decoder(nn.Module):
    """Layers between an embedding and a head; `encode` leaves the head out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 4), nn.LayerNorm(4), nn.Linear(4, 11)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def encode(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, ids: Tensor, *, whole: bool = True) -> Tensor:
        x = self.encode(ids)
        y: Tensor = self.head(self.norm(x)) if whole else x
        return y


def _decoder(names: tuple[str, ...], **options: Any) -> Decoder:
    model = built_decoder()
    for layer in model.layers:
        fully_shard(layer, **options)
    listed = [getattr(model, name) for name in names]
    assert fully_shard(listed, **options) is listed
    return fully_shard(model, **options)


def built_decoder() -> Decoder:
    """The model as one process has it."""
    torch.manual_seed(2)
    return Decoder()


def check_lists_of_modules_are_units(rank: int, world: int) -> None:
    """Bit-identical to plain training, also where a forward leaves some of them out."""
    ids = torch.arange(8).view(2, 4)
    groups = (("norm", "head"), ("embed", "head"), ("embed", "norm", "head"))
    for options in ({}, {"reshard_after_forward": False}, options_of("replicated")):
        for names in groups:
            model, reference = _decoder(names, **options), built_decoder()
            optimizers = [torch.optim.AdamW(each.parameters(), 0.1) for each in (model, reference)]
            for whole in (True, False, True):
                for net, optimizer in zip((model, reference), optimizers, strict=True):
                    optimizer.zero_grad()
                    net(ids, whole=whole).square().mean().backward()
                    optimizer.step()
                with torch.no_grad():
                    assert torch.equal(model(ids), reference(ids))
            same_bits(whole_state(model), dict(reference.state_dict()))


def check_list_is_gathered_once(rank: int, world: int) -> None:
    """Its modules share a buffer, which stays whole from the first call to the last."""
    model = _decoder(("embed", "head"))
    model.comm_counts()
    with torch.no_grad():
        model(torch.arange(8).view(2, 4))
    gathers = model.comm_counts().get("all_gather")
    assert (gathers.calls if gathers else 0) == (0 if world == 1 else 4)
