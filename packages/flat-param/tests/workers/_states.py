"""A model with everything that makes state dicts hard, trained alike on any number of ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from _harness import whole
from torch import Tensor, nn

import flat_param

UNUSED: list[str] = []
"""Whether models have a layer without gradients; torch refuses to load the state of such models."""


class Layer(nn.Module):
    """Odd sizes, a scalar, and a weight that is not row-major."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.down.weight = nn.Parameter(self.down.weight.detach().t().contiguous().t())
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """A head tied to the embedding, a frozen layer, a buffer, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 13)
        self.layers = nn.ModuleList(Layer(13) for _ in range(2))
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        if UNUSED:
            self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(13, 29, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.note = "new"

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(self.frozen(x))

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


def plain(seed: int = 0) -> Model:
    """The model as one process has it."""
    torch.manual_seed(seed)
    return Model()


def sharded(seed: int = 0, **options: Any) -> Model:
    """The same model, one unit for each layer and one around them."""
    model = plain(seed)
    for layer in model.layers:
        flat_param.fully_shard(layer, **options)
    return flat_param.fully_shard(model, **options)


def fsdp2(seed: int = 0) -> Model:
    """The same model, sharded by torch, which refuses scalars."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = plain(seed)
    for layer in model.layers:  # torch shards row-major weights only
        layer.down.weight = nn.Parameter(layer.down.weight.detach().contiguous())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    scalars = {p for p in model.parameters() if not p.dim()}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=scalars)
    return fully_shard(model, mesh=mesh, ignored_params=scalars)


def optimizer_of(model: nn.Module, *, flipped: bool = False) -> torch.optim.Optimizer:
    """AdamW with two groups, in either order."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    biases = {"params": [p for n, p in named if n.endswith("bias")], "lr": 0.02}
    others = {"params": [p for n, p in named if not n.endswith("bias")], "lr": 0.01}
    return torch.optim.AdamW([biases, others] if flipped else [others, biases], weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    """Steps with the same batch on each rank, so that gradients do not depend on their number."""
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 29, (4, 5), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()


def trained(steps: int, seed: int = 0, **options: Any) -> tuple[Model, torch.optim.Optimizer]:
    """A sharded model and its optimizer after some steps."""
    model = sharded(seed, **options)
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, steps)
    return model, optimizer


@cache
def truth(steps: int) -> dict[str, Tensor]:
    """Parameters and moments of one process after some steps."""
    model = plain()
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, steps)
    return plain_values(model, optimizer)


def plain_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and moments of a plain or FSDP2 model by name."""
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        found[name] = whole(param)
        for key, value in optimizer.state.get(param, {}).items():
            found[f"{name}/{key}"] = whole(value)
    return found


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The same of a sharded model. Collective.

    Uses nothing that is tested: every rank says which elements it has, and all are put together.
    """
    mine = []
    for unit in model._flat_param.schedule.units:
        for part in unit.parts:
            for param, piece in zip(part.params, part.pieces, strict=True):
                name = f"{unit.name}.{piece.spec.name}" if unit.name else piece.spec.name
                values = {name: param.detach()}
                state = optimizer.state.get(param, {}).items()
                values |= {f"{name}/{key}": value for key, value in state}
                where = piece.start, piece.spec.shape, piece.spec.stride
                mine += [(k, _local(v), *where) for k, v in values.items() if piece.numel]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found: dict[str, Tensor] = {}
    for key, value, start, shape, stride in (each for own in everyone for each in own):
        if key.endswith("/step"):
            found[key] = value
            continue
        whole = found.setdefault(key, torch.empty_strided(shape, stride))
        memory = whole.as_strided((whole.numel(),), (1,))
        memory[start : start + value.numel()] = value.as_strided((value.numel(),), (1,))
    return found


def _local(value: Any) -> Tensor:
    """This rank's elements; state that is loaded has a shard until the next step."""
    local: Tensor = getattr(value, "_local_tensor", value)
    local = local.detach().as_subclass(Tensor).clone()
    return local.reshape(()) if not value.dim() and local.numel() else local


def full_values(state: dict[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Parameters and moments in a full state dict of a model and its optimizer."""
    found = {name: state["model"][name] for name, _ in model.named_parameters()}
    for name, values in state["optim"]["state"].items():
        found |= {f"{name}/{key}": value for key, value in values.items()}
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that all values are equal to the last bit."""
    assert sorted(found) == sorted(expected), sorted(set(found) ^ set(expected))
    different = [key for key, value in expected.items() if not torch.equal(found[key], value)]
    assert not different, f"{len(different)} of {len(expected)} differ: {different[:5]}"
