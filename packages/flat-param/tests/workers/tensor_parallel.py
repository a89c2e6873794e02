"""Units of which parameters are DTensors: sharded over one axis of a mesh, cut over the other."""

from __future__ import annotations

from typing import Any

import torch
from _harness import distance, raises, whole, whole_state
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import flat_param
from flat_param import fully_shard

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"replicated": True, "boundary": "row"},
    {"reshard_after_forward": False, "boundary": "tensor"},
)


class Block(nn.Module):
    """Two layers that tensor parallel cuts, and a norm whose gradient is a sum over its ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks and a head that is whole everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain() -> Model:
    """The model as one process has it."""
    torch.manual_seed(0)
    return Model()


def parallel(mesh: DeviceMesh) -> Model:
    """The same model, its blocks cut over an axis."""
    model = plain()
    for block in model.blocks:
        plans = {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plans)
        cut = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))
        parallelize_module(block.norm, mesh, cut)
        norm = SequenceParallel(sequence_dim=0, use_local_output=True)
        parallelize_module(block.norm, mesh, norm)
    return model


def sharded(mesh: DeviceMesh, *, replicated: bool = False, **options: Any) -> Model:
    """Cut over the last axis, units over the first, or replicated over it."""
    model = parallel(mesh["tp"])
    options["mesh"] = mesh["dp", "one"] if replicated else mesh["dp"]
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def mesh_of(world: int) -> DeviceMesh:
    """Two rows of ranks."""
    return init_device_mesh("cpu", (2, 1, world // 2), mesh_dim_names=("dp", "one", "tp"))


def batch(step: int, share: int | None = None) -> Tensor:
    """Inputs of both rows of the mesh, `(4, 6)`, or of one of them."""
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    return whole if share is None else whole[2 * share : 2 * share + 2]


def check_training_is_that_of_one_process(rank: int, world: int) -> None:
    """States and norms of three steps, for every way and boundary."""
    mesh = mesh_of(world)
    for options in OPTIONS:
        reference, model = plain(), sharded(mesh, **options)
        params = list(model.parameters())
        assert not any(isinstance(param, DTensor) for param in params)
        for module, share in ((reference, None), (model, mesh["dp"].get_local_rank())):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            norms = []
            for step in range(3):
                optimizer.zero_grad()
                module(batch(step, share)).square().mean().backward()
                if module is model:
                    norms.append(model.clip_grad_norm_(0.5))
                else:
                    norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.5))
                optimizer.step()
            if module is reference:
                expected = norms
        assert torch.allclose(torch.stack(norms), torch.stack(expected)), (options, norms)
        assert distance(whole(whole_state(model)), whole_state(reference)) < 1e-6, options


def check_states_are_the_parallel_modules(rank: int, world: int) -> None:
    """Names, kinds, places and values; a plain state and one of DTensors are loaded."""
    mesh = mesh_of(world)
    model, cut = sharded(mesh), parallel(mesh["tp"])
    with model.whole_params():
        found = model.state_dict()
        for name, tensor in cut.state_dict().items():
            assert isinstance(found[name], DTensor) == isinstance(tensor, DTensor), name
            if isinstance(tensor, DTensor):
                places = found[name].placements, found[name].device_mesh
                assert places == (tensor.placements, tensor.device_mesh), name
    for state in (plain().state_dict(), whole_state(cut)):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        model.load_state_dict(state)
        assert distance(whole(whole_state(model)), plain().state_dict()) == 0
    with model.whole_params(write_back=True):
        assert isinstance(model.blocks[0].up.weight, DTensor)
        with torch.no_grad():
            model.blocks[0].up.weight.mul_(2)
    assert torch.equal(
        whole(whole_state(model)["blocks.0.up.weight"]), plain().blocks[0].up.weight * 2
    )


def check_gathers_by_hand_show_dtensors(rank: int, world: int) -> None:
    """Which lead backward into the unit, and may be written to."""
    mesh = mesh_of(world)
    model, reference = sharded(mesh), plain()
    model.blocks[0].unshard()
    weight = model.blocks[0].up.weight
    assert isinstance(weight, DTensor)
    assert torch.equal(whole(weight), reference.blocks[0].up.weight)
    (model(batch(0, mesh["dp"].get_local_rank())).square().mean()).backward()
    reference(batch(0)).square().mean().backward()
    for module in (model, reference):
        torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert distance(whole(whole_state(model)), whole_state(reference)) < 1e-6


def check_optimizers_of_replaced_parameters_are_refused(rank: int, world: int) -> None:
    """By name at the first step; attributes set by the user stay."""
    mesh = mesh_of(world)
    model = parallel(mesh["tp"])
    model.blocks[0].up.weight.tag = "mine"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    head = model.head.weight
    fully_shard(model, mesh=mesh["dp"])
    assert model.blocks[0].up.weight.tag == "mine"
    assert model.head.weight is head
    raises(
        flat_param.ParameterError,
        "parameter 'blocks.0.norm.weight' was a DTensor or on meta, and the optimizer still",
        optimizer.step,
    )


def check_what_cannot_be_cut_twice_is_refused(rank: int, world: int) -> None:
    """All ranks of both axes."""
    mesh = mesh_of(world)
    model = parallel(mesh["tp"])
    text = "is a DTensor over ranks that would shard it, too"
    raises(flat_param.ParameterError, text, lambda: fully_shard(model.blocks[0]))
    raises(flat_param.ParameterError, text, lambda: fully_shard(model.blocks[0], mesh=mesh["tp"]))
