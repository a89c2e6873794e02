"""torch's own functions for states and checkpoints, on sharded models; one check per claim.

Run on two ranks with a folder, for which it writes checkpoints that `dcp_resume.py` loads.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _harness import raises, stepping
from _states import (
    fsdp2,
    optimizer_of,
    plain,
    plain_values,
    same,
    sharded,
    train,
    trained,
    truth,
    values_of,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import flat_param

BOUNDARIES = ("element", "row", "tensor")
FOLDER = Path()


def state_of(model: nn.Module, optimizer: Any, **options: Any) -> dict[str, Any]:
    """What torch's documentation passes to `dcp.save`."""
    found = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return dict(zip(("model", "optim"), found, strict=True))


def put(model: nn.Module, optimizer: Any, state: dict[str, Any], **options: Any) -> None:
    """The reverse."""
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=StateDictOptions(**options),
    )


def load(model: nn.Module, optimizer: Any, path: str) -> None:
    """What torch's documentation does with a checkpoint."""
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    put(model, optimizer, state)


def check_saved_state_comes_back_and_trains_on(rank: int, world: int) -> None:
    """In the same model after more steps, and in another one; lr follows the groups' names."""
    for boundary in BOUNDARIES:
        model, optimizer = trained(3, boundary=boundary)
        path = f"{FOLDER}/{boundary}"
        dcp.save(state_of(model, optimizer), checkpoint_id=path)
        train(model, optimizer, 3, 5)
        other = sharded(7, boundary=boundary)
        fresh = optimizer_of(other, flipped=boundary == "row")
        for each, own in ((model, optimizer), (other, fresh)):
            load(each, own, path)
            same(values_of(each, own), truth(3))
            train(each, own, 3, 5)
            same(values_of(each, own), truth(5))


def check_load_in_place_needs_no_set(rank: int, world: int) -> None:
    """Shards of a state dict are the module's and the optimizer's own memory."""
    model, optimizer = trained(3)
    dcp.save(state_of(model, optimizer), checkpoint_id=f"{FOLDER}/in-place")
    train(model, optimizer, 3, 5)
    dcp.load(state_of(model, optimizer), checkpoint_id=f"{FOLDER}/in-place")
    found = values_of(model, optimizer)
    same({k: v for k, v in found.items() if not k.endswith("step")}, _no_steps(truth(3)))


def _no_steps(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if not k.endswith("step")}


def check_state_made_at_construction_is_saved_whole(rank: int, world: int) -> None:
    """Adagrad's, before its first step: by `state_dict()` and as it is, read in both ways."""
    model = sharded(3)
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    shapes = [tuple(param.full_tensor().shape) for param in model.parameters()]
    pieces = {str(at): optimizer.state[p]["sum"] for at, p in enumerate(model.parameters())}
    states = optimizer.state_dict()["state"].items()
    for name, values in (("pieces", pieces), ("dict", {str(k): v["sum"] for k, v in states})):
        dcp.save(dict(values), checkpoint_id=f"{FOLDER}/adagrad-{name}")
        whole = {str(at): torch.zeros(shape) for at, shape in enumerate(shapes)}
        dcp.load(whole, checkpoint_id=f"{FOLDER}/adagrad-{name}")
        assert all(bool((value == 0.5).all()) for value in whole.values())
    for values in (pieces, {str(k): v["sum"] for k, v in optimizer.state_dict()["state"].items()}):
        for value in pieces.values():
            value.zero_()
        dcp.load(dict(values), checkpoint_id=f"{FOLDER}/adagrad-pieces")
        assert all(bool((value.to_local() == 0.5).all()) for value in pieces.values())
    full = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    found = {name: tuple(value["sum"].shape) for name, value in full["state"].items()}
    assert found == dict(zip(dict(model.named_parameters()), shapes, strict=True))


def check_async_save_beside_training(rank: int, world: int) -> None:
    """With a separate process group, as the page says."""
    model, optimizer = trained(3)
    group = dist.new_group(backend="gloo")
    path = f"{FOLDER}/async"
    saved = dcp.async_save(state_of(model, optimizer), checkpoint_id=path, process_group=group)
    train(model, optimizer, 3, 5)
    saved.result()
    load(model, optimizer, path)
    same(values_of(model, optimizer), truth(3))


def check_full_state_is_taken(rank: int, world: int) -> None:
    """On every rank, from rank 0 alone, and what a plain model has saved."""
    one = plain()
    own = optimizer_of(one)
    train(one, own, 0, 3)
    model, optimizer = trained(3)
    ours = state_of(model, optimizer, full_state_dict=True)
    givens = (ours, False), (ours, True), (state_of(one, own), False)
    for boundary, (state, from_first) in zip(BOUNDARIES, givens, strict=True):
        given = {"model": {}, "optim": {}} if from_first and rank else copy.deepcopy(state)
        other = sharded(9, boundary=boundary)
        fresh = optimizer_of(other)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
        set_model_state_dict(other, given["model"], options=options)
        set_optimizer_state_dict(other, fresh, given["optim"], options=options)
        same(values_of(other, fresh), truth(3))


def check_flattened_state_with_groups_in_other_order(rank: int, world: int) -> None:
    """`flatten_optimizer_state_dict` and `optimizer.load_state_dict`; lr follows the names."""
    model, optimizer = trained(3)
    path, flat = f"{FOLDER}/flattened", {"flatten_optimizer_state_dict": True}
    dcp.save(state_of(model, optimizer, **flat), checkpoint_id=path)
    other = sharded(9)
    fresh = optimizer_of(other, flipped=True)
    for group in fresh.param_groups:
        group["lr"] = 0.5
    state = state_of(other, fresh, **flat)
    dcp.load(state, checkpoint_id=path)
    put(other, fresh, state, **flat)
    same(values_of(other, fresh), truth(3))
    assert [group["lr"] for group in fresh.param_groups] == [0.02, 0.01]
    last = sharded(9)
    raises(
        flat_param.CheckpointError,
        "was saved with flatten_optimizer_state_dict",
        lambda: flat_param.load_sharded(last, path, optimizer=optimizer_of(last)),
    )


def check_state_of_own_rank_comes_back(rank: int, world: int) -> None:
    """`torch.save` of state dicts, into an optimizer that has made no step."""
    for boundary in BOUNDARIES:
        model, optimizer = trained(3, boundary=boundary)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        other = sharded(9, boundary=boundary)
        fresh = optimizer_of(other)
        other.load_state_dict(state["model"])
        fresh.load_state_dict(state["optim"])
        same(values_of(other, fresh), truth(3))
        assert other.note == "new"


def check_state_of_other_rank_is_refused(rank: int, world: int) -> None:
    """Although pieces have the same shape on all ranks; and nothing changes."""
    layer = flat_param.fully_shard(nn.Linear(8, 8, bias=False))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save((layer.state_dict(), optimizer.state_dict()), file)
    files: list[Any] = [None] * world
    dist.all_gather_object(files, file.getvalue())
    theirs = torch.load(io.BytesIO(files[1 - rank]), weights_only=True)
    before = [layer.weight.detach().clone(), optimizer.state[layer.weight]["exp_avg"].clone()]
    raises(RuntimeError, "It was saved by another rank", lambda: layer.load_state_dict(theirs[0]))
    raises(
        flat_param.StateError,
        "It was saved by another rank",
        lambda: optimizer.load_state_dict(theirs[1]),
    )
    assert torch.equal(before[0], layer.weight)
    assert torch.equal(before[1], optimizer.state[layer.weight]["exp_avg"])
    assert len(optimizer.state_dict()["state"]) == 1


def check_shards_are_dtensors_whose_copies_are_shards(rank: int, world: int) -> None:
    """Elementwise results, too."""
    value = get_model_state_dict(sharded())["embed.weight"]
    assert isinstance(value, DTensor)
    assert value.shape == (29, 13)
    whole = value.full_tensor()
    assert torch.equal((value + 1).full_tensor(), whole + 1)
    copied = value.clone()
    assert copied.mul_(2) is copied
    assert torch.equal(copied.full_tensor(), 2 * whole)
    for copied in (value.clone(), value.detach(), value.cpu(), value.half(), copy.deepcopy(value)):
        assert torch.equal(copied.full_tensor().float(), whole.to(copied.dtype).float())
    assert "embed.weight" in repr(value)


def check_whole_tensors_load(rank: int, world: int) -> None:
    """Into the sharded model and into a module inside, assigned or copied; wrong shapes raise."""
    expected = plain(3).state_dict()
    for assign in (False, True):
        model = sharded()
        optimizer = optimizer_of(model)
        assert "All keys matched" in str(model.load_state_dict(expected, assign=assign))
        assert not model.comm_counts()
        found = values_of(model, optimizer)
        same(found, {k: v for k, v in expected.items() if k in found})
        model.layers[0].load_state_dict(plain(4).layers[0].state_dict(), assign=assign)
        found = values_of(model, optimizer)
        assert torch.equal(found["layers.0.up.weight"], plain(4).layers[0].up.weight)
        assert torch.equal(found["layers.1.up.weight"], expected["layers.1.up.weight"])
        train(model, optimizer, 0, 1)
    wrong = {**expected, "head.weight": torch.ones(29, 12)}
    raises(RuntimeError, "'head.weight' has shape (29, 12)", lambda: model.load_state_dict(wrong))
    del wrong["frozen.bias"], wrong["head.weight"]
    raises(RuntimeError, '"frozen.bias"', lambda: model.load_state_dict(wrong))
    part = model.load_state_dict({"embed.weight": expected["embed.weight"]}, strict=False)
    assert "layers.0.up.weight" in part.missing_keys


def check_count_of_ranks_that_skip_does_not_count(rank: int, world: int) -> None:
    """Where only ranks that have elements step a parameter, theirs is the step that is saved.

    A count may be a number of Python; it comes back as one.
    """

    def count(param: Tensor, state: dict[str, Any], lr: float) -> None:
        state["count"] = state.get("count", 0) + 1
        state["sum"] = state.get("sum", 0) + param.grad

    model = flat_param.fully_shard(
        nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), boundary="tensor"
    )
    optimizer = stepping(count)(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    mine = optimizer.state[model[rank].weight]
    mine["count"] = 7 + rank
    full = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    counts = [int(full["state"][f"{at}.weight"]["count"]) for at in range(2)]
    assert counts == [7, 8], counts
    path = f"{FOLDER}/counts"
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)
    mine["count"] = 0
    state = {"optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, state["optim"])
    again = optimizer.state[model[rank].weight]
    assert again["count"] == 7 + rank, again["count"]
    assert type(again["count"]) is int


def check_state_without_a_shard_is_refused(rank: int, world: int) -> None:
    """Adafactor's vectors are on the rank with the parameter; only `save_sharded` knows which."""
    layers = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 8, bias=False))
    model = flat_param.fully_shard(layers, boundary="tensor")
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    for call in (optimizer.state_dict, lambda: get_optimizer_state_dict(model, optimizer)):
        raises(flat_param.StateError, "_var' of parameter", call)
    path = f"{FOLDER}/factored"
    flat_param.save_sharded(model, path, optimizer=optimizer)
    (state,) = (values for values in optimizer.state.values() if values)
    expected = state["row_var"].clone()
    state["row_var"].zero_()
    flat_param.load_sharded(model, path, optimizer=optimizer)
    (state,) = (values for values in optimizer.state.values() if values)
    assert torch.equal(state["row_var"], expected)


def check_checkpoints_of_fsdp2_and_of_plain_models(rank: int, world: int) -> None:
    """Both ways, through torch and through `load_sharded`."""
    theirs = fsdp2()
    their_optimizer = optimizer_of(theirs)
    train(theirs, their_optimizer, 0, 3)
    expected = plain_values(theirs, their_optimizer)
    dcp.save(state_of(theirs, their_optimizer), checkpoint_id=f"{FOLDER}/fsdp2")
    one = plain()
    own = optimizer_of(one)
    train(one, own, 0, 3)
    dcp.save(state_of(one, own), checkpoint_id=f"{FOLDER}/plain")
    saved = {"fsdp2": expected, "plain": truth(3)}
    for boundary, name in zip(BOUNDARIES, ("fsdp2", "plain", "fsdp2"), strict=True):
        model = sharded(9, boundary=boundary)
        optimizer = optimizer_of(model)
        load(model, optimizer, f"{FOLDER}/{name}")
        same(values_of(model, optimizer), saved[name])
        other = sharded(9, boundary=boundary)
        fresh = optimizer_of(other, flipped=True)
        flat_param.load_sharded(other, f"{FOLDER}/{name}", optimizer=fresh)
        same(values_of(other, fresh), saved[name])
        assert [group["lr"] for group in fresh.param_groups] == [0.02, 0.01]
        model = {"fsdp2": fsdp2, "plain": plain}[name](9)
        optimizer = optimizer_of(model)
        load(model, optimizer, f"{FOLDER}/{boundary}")
        same(plain_values(model, optimizer), truth(3))
