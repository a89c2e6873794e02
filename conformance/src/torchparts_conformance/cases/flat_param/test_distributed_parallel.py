"""Sharded modules beside what else divides, calls or compiles them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._sharded import (
    Net,
    batch,
    distance,
    loss_of,
    mine,
    plain,
    sharded,
    stepped,
    train,
    whole_state,
)


def _even() -> nn.Module:
    """The model with blocks that two ranks cut in halves."""
    model = plain()
    for index in range(2):
        model.inner[index] = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))
    return model


def _rows_and_columns() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _cut_twice(part: Any, mesh: DeviceMesh) -> Any:
    model = _even()
    for block in model.inner:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        part.fully_shard(block, mesh=mesh["dp"])
    return part.fully_shard(model, mesh=mesh["dp"])


def _on_two_axes(part: Any, rank: int, world_size: int) -> list[Any]:
    mesh = _rows_and_columns()
    reference, model = _even(), _cut_twice(part, mesh)
    row = mesh["dp"].get_local_rank()
    train(reference, [batch(2, step) for step in range(2)])
    train(model, [mine(batch(2, step), row) for step in range(2)])
    kept = sum(_local(param).numel() for param in model.parameters())
    return [kept, distance(_whole(whole_state(model)), whole_state(reference))]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    pairs = state.items()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in pairs}


@requirement(
    "FP-197",
    level="MUST",
    text=(
        "A module whose parameters are DTensors over one axis of a mesh, sharded over the other"
        " axis, MUST train to the state of one process, in optimizer steps and in its state "
        "dict."
    ),
    rationale=(
        "models too wide for one rank are cut by tensor parallel first and sharded over the "
        "other axis"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_parameters_cut_by_tensor_parallel_train_as_in_one_process(part, ranks):
    """Two rows of ranks hold parts, two columns cut the layers of the blocks in halves."""
    numel = sum(param.numel() for param in _even().parameters())
    for kept, error in ranks(4, _on_two_axes):
        assert kept < numel / 2  # the head and what nothing uses are on both columns
        assert error < 1e-5


def _loaded(part: Any, model: Any, folder: str) -> tuple[dict[str, Tensor], Any]:
    """Weights and moments of a model that has forgotten its own, once loaded."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(7)
    part.load_sharded(model, folder, optimizer=optimizer)
    return _saved_state(part, model, optimizer)


def _saved_state(part: Any, model: Any, optimizer: Any) -> tuple[dict[str, Tensor], Any]:
    state = part.full_state_dict(model, optimizer=optimizer)
    moments = {
        f"{name} {key}": value
        for name, values in state["optim"]["state"].items()
        for key, value in values.items()
    }
    return _whole(state["model"]), _whole(moments)


def _checkpoint_of_two_axes(part: Any, rank: int, world_size: int, folder: str) -> list[float]:
    mesh = _rows_and_columns()
    model = _cut_twice(part, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model, mine(batch(2), mesh["dp"].get_local_rank())).backward()
    optimizer.step()
    weights, moments = _saved_state(part, model, optimizer)
    part.save_sharded(model, folder, optimizer=optimizer)
    dist.barrier()
    errors = []
    for other in (_cut_twice(part, mesh), part.fully_shard(_even())):
        found, found_moments = _loaded(part, other, folder)
        errors += [distance(found, weights), distance(found_moments, moments)]
    return errors


@requirement(
    "FP-238",
    level="MUST",
    text=(
        "A sharded checkpoint of a module whose parameters are DTensors over one axis of a "
        "mesh, sharded over the other axis, MUST come back bit by bit, weights and optimizer "
        "state, into the same module and into one that no tensor parallel has cut."
    ),
    rationale=(
        "what one column of ranks has alone is not in another's part: a checkpoint of the first"
        " column loads without an error, and the rest of each layer is what it was"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_checkpoint_of_two_axes_comes_back_over_any(part, ranks, tmp_path):
    """Weights and moments, over the same mesh and over four ranks without tensor parallel."""
    for errors in ranks(4, _checkpoint_of_two_axes, str(tmp_path / "saved")):
        assert errors == [0.0] * 4


class _GroupSizes(TorchDispatchMode):
    """Notes of how many ranks each collective is that puts parts together, or may."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if "c10d" in namespace and ("gather" in name or "alltoall" in name):
            (group,) = (each for each in args if isinstance(each, torch.ScriptObject))
            self.found.append(dist.ProcessGroup.unbox(group).size())
        return func(*args, **(kwargs or {}))


def _kept_by_two(part: Any, rank: int, world_size: int) -> list[Any]:
    found: list[Any] = []
    reference = plain()
    loss_of(reference, batch(world_size)).backward()
    expected = stepped(reference)
    for ranks in (True, 2):
        model = sharded(part, reshard_after_forward=ranks)
        with _GroupSizes() as sizes:
            loss_of(model, mine(batch(world_size), rank)).backward()
        found += [sorted(sizes.found), distance(stepped(model), expected)]
    return found


@requirement(
    "FP-198",
    level="MUST",
    text=(
        "A unit inside that is sharded with `reshard_after_forward=n`, a number of ranks, MUST "
        "be gathered in backward from the parts of n ranks, and gradients MUST be those of one "
        "process."
    ),
    rationale=(
        "ranks of one machine gather from each other much faster than all ranks do; a number "
        "taken for True shows in no gradient"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_backward_gathers_inside_of_smaller_groups(part, ranks):
    """The two inner units are gathered from two ranks each, where it was four."""
    for usual, error, fewer, other_error in ranks(4, _kept_by_two):
        assert set(usual) == {4}
        assert fewer.count(2) >= 2
        assert len(fewer) == len(usual)
        assert max(error, other_error) < 1e-5


class _Past(Net):
    """Calls a layer inside of its first block itself, too."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the blocks and the head to (B, 5)."""
        return super().forward(x) + self.inner[0][0](x)[:, :3]


def _past_its_unit(part: Any, rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(0)
    reference, model = _Past(), _Past()
    model.load_state_dict(whole_state(reference))
    for block in model.inner:
        part.fully_shard(block)
    part.fully_shard(model)
    loss_of(reference, batch(world_size)).backward()
    try:
        loss_of(model, mine(batch(world_size), rank)).backward()
    except Exception as error:
        return [str(error), 0.0]
    return ["", distance(stepped(model), stepped(reference))]


@requirement(
    "FP-199",
    level="MUST",
    text=(
        "A module that is called by another path than its unit's call MUST compute with whole "
        "parameters, or end in an error that names the module or its parameter."
    ),
    rationale=(
        "models call parts of their blocks, as diffusers' DiT does; a size that does not fit "
        "says nothing of sharding; pytorch#109385"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_module_that_is_called_past_its_unit_is_right_or_named(part, ranks):
    """The model calls `inner.0.0`, whose parameters are the unit's around it."""
    for text, error in ranks(2, _past_its_unit):
        assert not text or "inner.0.0" in text, text
        assert error < 1e-5


def _outer_first(part: Any, rank: int, world_size: int) -> list[Any]:
    reference, model = plain(), plain()
    loss_of(reference, batch(world_size)).backward()
    try:
        part.fully_shard(model)
        for block in model.inner:
            part.fully_shard(block)
        loss_of(model, mine(batch(world_size), rank)).backward()
    except Exception as error:
        return [str(error), 0.0]
    return ["", distance(stepped(model), stepped(reference))]


@requirement(
    "FP-200",
    level="MUST",
    text=(
        "Sharding a module inside one that is sharded already MUST train as one process does, "
        "or raise an error that names a parameter."
    ),
    rationale="reproduced: the order of the calls was taken for another rank's mistake",
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_outer_modules_first_are_right_or_named(part, ranks):
    """The whole model is sharded, and then its blocks."""
    for text, error in ranks(2, _outer_first):
        assert not text or "weight" in text, text
        assert error < 1e-5


class _Encoder(Net):
    """A tree of its own."""


def _two_roots(part: Any, rank: int, world_size: int) -> list[float]:
    found = []
    for detached in (False, True):
        torch.manual_seed(0)
        pairs = [(_Encoder(), nn.Linear(3, 2)) for _ in "ab"]
        (encoder, decoder), reference = pairs[0], pairs[1]
        for mine_, theirs in zip(pairs[0], reference, strict=True):
            mine_.load_state_dict(theirs.state_dict())
        for block in encoder.inner:
            part.fully_shard(block)
        part.fully_shard(encoder)
        part.fully_shard(decoder)
        for (first, second), share in (
            (reference, batch(world_size)),
            ((encoder, decoder), mine(batch(world_size), rank)),
        ):
            code = first(share)
            second(code.detach() if detached else code).square().mean().backward()
            second(first(share)).square().mean().backward()
        for mine_, theirs in zip((encoder, decoder), reference, strict=True):
            found.append(distance(stepped(mine_), stepped(theirs)))
    return found


@requirement(
    "FP-201",
    level="MUST",
    text=(
        "Sharded trees beside each other MUST have the gradients of one process, where one's "
        "output is the other's input and where it is detached between them."
    ),
    rationale="an encoder and a decoder, or a teacher and a student, are trees of their own",
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_two_trees_train_in_one_loss(part, ranks):
    """One tree's output is the other's input, once cut off from it: a partial backward."""
    for errors in ranks(2, _two_roots):
        assert len(errors) == 4
        assert max(errors) < 1e-5, errors


class _Residual(nn.Module):
    """Of a class of its own: the compiler does not look into torch's containers."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        """Apply two layers to (B, 5)."""
        return self.layers(x)


def _blocks() -> nn.Module:
    model = plain()
    model.inner = nn.ModuleList(_Residual(block) for block in model.inner)
    return model


def _compiled(part: Any, rank: int, world_size: int) -> list[float]:
    reference, found = _blocks(), []
    loss_of(reference, batch(world_size)).backward()
    expected = stepped(reference)
    for compiled_first in (True, False):
        torch.compiler.reset()
        model = _blocks()
        for block in model.inner:
            if compiled_first:
                block.compile(backend="eager", fullgraph=True)
            part.fully_shard(block)
            if not compiled_first:
                block.compile(backend="eager", fullgraph=True)
        part.fully_shard(model)
        loss_of(model, mine(batch(world_size), rank)).backward()
        found.append(distance(stepped(model), expected))
    return found


@requirement(
    "FP-202",
    level="MUST",
    text=(
        "A module that is compiled as one graph MUST stay one as a unit, compiled before or "
        "after it was sharded, with the gradients of one process."
    ),
    rationale="each break of a graph costs what compiling had gained, and nobody is told",
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_compiled_units_are_one_graph(part, ranks):
    """Compiled before or after sharding, and told that a break is an error."""
    for errors in ranks(2, _compiled):
        assert max(errors) < 1e-5
