"""Options that FSDP2 has too: the same outputs and gradients, bit by bit; one check per claim."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from _harness import main, run_checks
from _whole import whole_grads
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

from flat_param import MixedPrecision, fully_shard

LOW = torch.bfloat16


@dataclass(frozen=True)
class Found:
    """What a layer gives: tensors in containers, one of them no floating point."""

    hidden: Tensor
    more: dict[str, Any]
    count: int = field(default=0)


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


def their_grads(model: Model) -> dict[str, Tensor]:
    """Whole gradients of FSDP2's parameters, by name."""
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def assert_same(theirs: Model, ours: Model, rank: int) -> None:
    """Outputs and gradients of a step, then of two steps, are equal and not zero."""
    for seed in (1, 2):
        outputs = step(theirs, rank, seed), step(ours, rank, seed)
        for mine, its in zip(*outputs, strict=True):
            assert mine.dtype is its.dtype
            assert torch.equal(mine, its)
        expected, found = their_grads(theirs), whole_grads(ours)
        assert list(expected) == list(found)
        for name, grad in expected.items():
            assert torch.equal(grad, found[name]), name
            assert grad.any(), name


def check_outputs_are_cast_as_fsdp2_casts_them(rank: int, world: int) -> None:
    """Nested ones, of units inside and of the outermost; what is no floating point stays."""
    for inner, outer in ((torch.float32, torch.float64), (None, torch.float32), (LOW, None)):
        dtypes = [{"param_dtype": LOW, "output_dtype": dtype} for dtype in (inner, outer)]
        for reduced in (None, torch.float32):
            options = [{**each, "reduce_dtype": reduced} for each in dtypes]
            theirs, ours = models(
                [{"mp_policy": MixedPrecisionPolicy(**each)} for each in options],
                [{"mixed_precision": MixedPrecision(**each)} for each in options],
                world,
            )
            assert_same(theirs, ours, rank)
            assert ours.seen == theirs.seen == [inner or LOW] * 2


def check_outputs_are_cast_in_methods_and_after_hooks(rank: int, world: int) -> None:
    """A registered method's outputs are; a forward hook sees what forward computed."""
    seen: list[torch.dtype] = []
    layer = fully_shard(Layer(), mixed_precision=MixedPrecision(LOW, output_dtype=torch.float64))
    layer.register_forward_hook(lambda _, __, out: seen.append(out.hidden.dtype))
    layer.register_forward_method("encode")
    assert layer.encode(torch.ones(2, 4)).dtype == torch.float64
    assert layer(torch.ones(2, 4)).more["up"][0].dtype == torch.float64
    assert seen == [LOW]


def run(rank: int, world: int) -> dict[str, str]:
    """All checks."""
    return run_checks(globals(), rank, world)


if __name__ == "__main__":
    main(run)
