"""Run a script of this folder on one rank; models and helpers that scripts share."""

from __future__ import annotations

import importlib
import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import flat_param

# torch 2.9's own checkpoint writer calls what it warns of.
warnings.filterwarnings("ignore", message="TypedStorage is deprecated")

WAYS = ("replicated", "ZeRO-2", "ZeRO-3")


@cache
def _replicas() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(), 1))


def options_of(way: str) -> dict[str, Any]:
    """What `fully_shard` is given for a way to divide memory. Collective at the first call."""
    if way == "replicated":
        return {"mesh": _replicas()}
    return {"reshard_after_forward": way != "ZeRO-2"}


def planned_as(way: str, world: int) -> dict[str, Any]:
    """The same for `plan_training`."""
    if way == "replicated":
        return {"world_size": 1}
    return {"world_size": world, "reshard_after_forward": way != "ZeRO-2"}


class Block(nn.Module):
    """A residual block with odd sizes, a layer that nothing uses, and a scalar."""

    def __init__(self, width: int, *, scalars: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)
        self.unused = nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.ones(() if scalars else 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Three blocks between an embedding and a head; one buffer.

    Attributes:
        order: numbers of the blocks that run.
    """

    def __init__(self, width: int = 7, depth: int = 3, *, scalars: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width, scalars=scalars) for _ in range(depth))
        self.head = nn.Linear(width, 11)
        self.register_buffer("scale", torch.tensor(2.0))
        self.order: Sequence[int] = range(depth)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


def plain(seed: int = 0, **sizes: Any) -> Model:
    """The model as one process has it."""
    torch.manual_seed(seed)
    return Model(**sizes)


def sharded(seed: int = 0, *, scalars: bool = True, **options: Any) -> Model:
    """The same model, one unit per block and one around them."""
    model = plain(seed, scalars=scalars)
    for block in model.blocks:
        flat_param.fully_shard(block, **options)
    return flat_param.fully_shard(model, **options)


def batches(world: int, steps: int = 3) -> list[Tensor]:
    """For each step the ids of all ranks, `(2 * world, 5)`."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 11, (2 * world, 5), generator=generator) for _ in range(steps)]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Next-token loss; the mean over ranks is the loss of the whole batch."""
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def share(ids: Tensor, rank: int) -> Tensor:
    """One rank's part of a batch."""
    return ids[2 * rank : 2 * rank + 2]


def whole_state(model: nn.Module) -> dict[str, Any]:
    """A state dict of copies of whole tensors; the model may be plain. Collective."""
    if isinstance(model, flat_param.ShardedModule):  # gathers units, not one tensor after another
        with model.whole_params():
            found: dict[str, Any] = whole(model.state_dict())
            return found
    state: dict[str, Any] = flat_param.full_state_dict(model)["model"]
    return state


def whole(value: Any) -> Any:
    """A tensor, or all tensors of nested dicts: DTensors made whole, and copied. Collective."""
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone() if isinstance(value, Tensor) else value


def same_bits(first: Any, second: Any, *context: Any) -> None:
    """Assert that nested dicts of tensors and other values are equal, bit for bit."""
    if isinstance(first, dict):
        assert sorted(first) == sorted(second), context
        for key, value in first.items():
            same_bits(value, second[key], key, *context)
    elif isinstance(first, Tensor):
        assert first.dtype is second.dtype, context
        assert torch.equal(first, second), (first, second, context)
    else:
        assert first == second, context


def mean_over_ranks(values: list[float]) -> list[float]:
    """The same on every rank."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference between two state dicts of the same keys and shapes; NaN is kept."""
    shapes = [[(name, each.shape) for name, each in state.items()] for state in (first, second)]
    assert shapes[0] == shapes[1]
    pairs = zip(first.values(), second.values(), strict=True)
    found = torch.stack([(a - b).abs().max().double() for a, b in pairs if a.numel()])
    return found.max().item()


def raises(kind: type[Exception], text: str, call: Any) -> None:
    """Assert that a call fails with a message that has `text` in it."""
    with pytest.raises(kind, match=re.escape(text)):
        call()


def stepping(update: Callable[[Tensor, dict[str, Any], float], object]) -> Any:
    """Return an optimizer class that calls `update(param, state, lr)` where there is a gradient."""

    class Stepping(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        update(param, self.state[param], group["lr"])

    return Stepping


def checks(namespace: dict[str, Any], *settings: str) -> Callable[..., dict[str, str]]:
    """Return a function that runs every `check_<claim>(rank, world)` of a script on one rank.

    Its result has a text for each claim, empty if the claim held. Arguments of the run become the
    globals that `settings` names.
    """

    def run(rank: int, world: int, *given: Any) -> dict[str, str]:
        namespace.update(zip(settings, given, strict=True))
        results = {}
        for name, check in list(namespace.items()):
            if name.startswith("check_"):
                try:
                    check(rank, world)
                    results[name.removeprefix("check_")] = ""
                except pytest.skip.Exception as reason:
                    results[name.removeprefix("check_")] = f"skipped: {reason}"
                except (Exception, pytest.fail.Exception):  # the latter is no Exception
                    results[name.removeprefix("check_")] = traceback.format_exc()
                dist.barrier()
        return results

    return run


def be_rank(rank: int, world: int, script: str, folder: str, *args: Any) -> Any:
    """Run a script on one rank, or its checks if it has no `run`.

    `FOLDER` in it is a folder that all ranks of the run have.
    """
    module: Any = importlib.import_module(script)
    module.FOLDER = Path(folder)
    run = getattr(module, "run", None) or checks(vars(module))
    return run(rank, world, *args)
