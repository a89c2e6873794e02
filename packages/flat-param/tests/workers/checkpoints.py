"""Whole and sharded checkpoints on several ranks; one check per claim."""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _harness import batches, loss_of, main, plain, run_checks, sharded, share
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp import fully_shard as fsdp2

import flat_param
from flat_param._torch_compat import without_storage_warning

FOLDER = Path()
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"strategy": "FULL_SHARD"},
    {"strategy": "SHARD_GRAD_OP", "boundary": "row"},
    {"strategy": "FULL_SHARD", "boundary": "tensor"},
    {"strategy": "FULL_SHARD", "boundary": flat_param.Blocks((4, 4))},
    {
        "strategy": "FULL_SHARD",
        "boundary": flat_param.by_name({"*weight": flat_param.Blocks(3)}, missing_ok=True),
    },
    {"strategy": "NO_SHARD"},
)


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    """Two groups with different options, as decayed and other parameters have."""
    named = list(model.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in named if "norm" not in n], "weight_decay": 0.1},
            {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0},
        ],
        lr=lr,
    )


def trained(rank: int, world: int, **options: Any) -> tuple[nn.Module, torch.optim.AdamW]:
    """A model after two steps."""
    model = sharded(**options)
    optimizer = adamw(model)
    for ids in batches(world, 2):
        optimizer.zero_grad()
        loss_of(model, share(ids, rank)).backward()
        optimizer.step()
    return model, optimizer


def fresh(**options: Any) -> tuple[nn.Module, torch.optim.AdamW]:
    """Another model with another seed and learning rate."""
    model = sharded(seed=9, **options)
    return model, adamw(model, lr=0.5)


def assert_same(first: Any, second: Any) -> None:
    """Nested states are equal, bit for bit."""
    assert type(first) is type(second), (first, second)
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_same(first[key], second[key])
    elif isinstance(first, (list, tuple)):
        for a, b in zip(first, second, strict=True):
            assert_same(a, b)
    elif isinstance(first, Tensor):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
    else:
        assert first == second


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything, whole."""
    return flat_param.full_state_dict(model, optimizer=optimizer)


def saved(rank: int, world: int, name: str, **options: Any) -> tuple[Path, dict[str, Any]]:
    """A checkpoint on disk, and what it must hold."""
    model, optimizer = trained(rank, world, **options)
    flat_param.save_sharded(model, FOLDER / name, optimizer=optimizer)
    dist.barrier()
    return FOLDER / name, state(model, optimizer)


def check_full_state_equals_the_plain_one(rank: int, world: int) -> None:
    """Keys, shapes and dtypes are the plain module's and optimizer's, in both directions."""
    for options in LAYOUTS:
        model, optimizer = trained(rank, world, **options)
        whole = state(model, optimizer)
        reference = plain(seed=9)
        other = adamw(reference)
        reference.load_state_dict(whole["model"])
        other.load_state_dict(flat_param.optimizer_state_by_position(whole["optim"]))
        again, again_optimizer = fresh(**options)
        flat_param.load_full_state_dict(
            again,
            {"model": reference.state_dict(), "optim": other.state_dict()},
            optimizer=again_optimizer,
        )
        assert list(whole["model"]) == list(reference.state_dict())
        assert_same(state(again, again_optimizer), whole)


def check_sharded_save_makes_no_collective(rank: int, world: int) -> None:
    """Neither our counters nor any communicating function of torch.distributed see a call."""
    model, optimizer = trained(rank, world)
    model.comm_counts()
    called: list[str] = []
    talking = re.compile("all_|broadcast|gather|i?send|i?recv|reduce|scatter|barrier|batch_")
    names = [name for name in dir(dist) if talking.match(name) and callable(getattr(dist, name))]
    assert len(names) > 20, names
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            for home in (dist, dist.distributed_c10d):
                patch.setattr(home, name, lambda *_, name=name, **__: called.append(name), False)
        flat_param.save_sharded(model, FOLDER / "silent", optimizer=optimizer)
        assert not called
        dist.barrier()
        assert called == ["barrier"]
    assert not model.comm_counts()


def check_sharded_state_comes_back(rank: int, world: int) -> None:
    """Parameters, buffers, moments, steps and options survive, whatever the layout."""
    for index, options in enumerate(LAYOUTS):
        path, whole = saved(rank, world, f"round-{index}", **options)
        for others in LAYOUTS:
            model, optimizer = fresh(**others)
            flat_param.load_sharded(model, path, optimizer=optimizer)
            assert_same(state(model, optimizer), whole)


def check_offline_resharding_changes_nothing(rank: int, world: int) -> None:
    """W to W' and back, one process, no group: the same state."""
    path, whole = saved(rank, world, "offline")
    for ways in (1, 2, 3, 4, 8):
        if rank == 0:
            flat_param.reshard_checkpoint(path, FOLDER / f"offline-{ways}", world_size=ways)
            back = FOLDER / f"offline-{ways}-back"
            flat_param.reshard_checkpoint(FOLDER / f"offline-{ways}", back, world_size=world)
        dist.barrier()
        for name in (f"offline-{ways}", f"offline-{ways}-back"):
            model, optimizer = fresh()
            flat_param.load_sharded(model, FOLDER / name, optimizer=optimizer)
            assert_same(state(model, optimizer), whole)


def check_torch_loads_our_checkpoint(rank: int, world: int) -> None:
    """torch.distributed.checkpoint fills a plain module's state dict from it."""
    path, whole = saved(rank, world, "for-torch")
    model = plain(seed=9)
    target = {"model": model.state_dict()}
    dcp.load(target, checkpoint_id=path)
    assert_same(dict(sorted(target["model"].items())), dict(sorted(whole["model"].items())))


def check_fsdp2_checkpoints_load(rank: int, world: int) -> None:
    """What FSDP2 saved, with its optimizer, loads into ours."""
    model = plain(scalars=False)  # FSDP2 takes no 0-dim parameters
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fsdp2(block, mesh=mesh)
    fsdp2(model, mesh=mesh)
    optimizer = adamw(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        loss_of(model, share(batches(world)[0], rank)).backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    with without_storage_warning():  # torch's own writer, on 2.9
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=FOLDER / "fsdp2")
    ours, its_optimizer = fresh(scalars=False)
    flat_param.load_sharded(ours, FOLDER / "fsdp2", optimizer=its_optimizer)
    whole = state(ours, its_optimizer)
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(whole["model"][name], full)
    moment = moments["state"]["head.weight"]["exp_avg"].full_tensor()
    assert torch.equal(whole["optim"]["state"]["head.weight"]["exp_avg"], moment)
    if rank == 0:
        flat_param.reshard_checkpoint(FOLDER / "fsdp2", FOLDER / "fsdp2-cut", world_size=3)
    dist.barrier()
    again, again_optimizer = fresh(scalars=False)
    flat_param.load_sharded(again, FOLDER / "fsdp2-cut", optimizer=again_optimizer)
    assert_same(state(again, again_optimizer), whole)


def check_fsdp1_full_checkpoints_load(rank: int, world: int) -> None:
    """A file with FSDP1's full state dict loads, and so does a plain one."""
    model = FullyShardedDataParallel(
        plain(seed=4, scalars=False), device_id=torch.device("cpu"), use_orig_params=True
    )
    config = FullStateDictConfig(rank0_only=False)
    with (
        pytest.warns(FutureWarning),
        FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config),
    ):
        whole = model.state_dict()
    if rank == 0:
        torch.save(whole, FOLDER / "fsdp1.pt")
    dist.barrier()
    ours = sharded(scalars=False)
    flat_param.load_sharded(ours, FOLDER / "fsdp1.pt")
    assert_same(dict(ours.state_dict()), dict(plain(seed=4, scalars=False).state_dict()))


def check_adafactor_state_is_kept(rank: int, world: int) -> None:
    """State that is not of its parameter's shape is saved by the rank that has it."""
    options = {"boundary": "tensor"}
    (ids,) = batches(world, 1)
    model, again = sharded(**options), sharded(seed=9, **options)
    optimizers = []
    for module in (model, again):
        loss_of(module, share(ids, rank)).backward()
        matrices = [module.embed.weight, module.head.weight, module.blocks[1].up.weight]
        optimizers.append(torch.optim.Adafactor(matrices, lr=0.1))
        optimizers[-1].step()
    flat_param.save_sharded(model, FOLDER / "adafactor", optimizer=optimizers[0])
    dist.barrier()
    flat_param.load_sharded(again, FOLDER / "adafactor", optimizer=optimizers[1])
    assert_same(state(again, optimizers[1]), state(model, optimizers[0]))


def check_state_of_another_shape_is_refused_by_name(rank: int, world: int) -> None:
    """A scale for each block of what a rank holds has no place by name; nothing is changed."""
    model, optimizer = trained(rank, world)
    uncut, by_tensor = trained(rank, world, boundary="tensor")
    before = state(model, optimizer)
    for each in (optimizer, by_tensor):
        for values in each.state.values():
            values["packed"] = (torch.ones(3, 32), torch.ones(3, 1))
    path = FOLDER / "blocks"
    assert flat_param.save_sharded(uncut, path, optimizer=by_tensor)
    again = fresh(boundary="tensor")
    flat_param.load_sharded(again[0], path, optimizer=again[1])
    assert all("packed" in values for values in again[1].state.values())
    whole = flat_param.full_state_dict(again[0], optimizer=again[1])
    if world == 1:  # which has the whole parameters anyway
        assert flat_param.save_sharded(model, path, optimizer=optimizer)
        return
    for call in (
        lambda: flat_param.save_sharded(model, FOLDER / "never", optimizer=optimizer),
        lambda: flat_param.async_save_sharded(model, FOLDER / "never", optimizer=optimizer),
        lambda: flat_param.full_state_dict(model, optimizer=optimizer),
        lambda: flat_param.load_sharded(model, path, optimizer=optimizer),
        lambda: flat_param.load_full_state_dict(model, whole, optimizer=optimizer),
    ):
        with pytest.raises(flat_param.StateError, match=r"'packed' of parameter '.*boundary="):
            getattr(call(), "result", lambda: None)()
    assert not (FOLDER / "never").exists()
    for values in optimizer.state.values():
        del values["packed"]
    assert_same(state(model, optimizer), before)


def refused(call: Any, text: str) -> None:
    """Assert a CheckpointError with `text` in it."""
    with pytest.raises(flat_param.CheckpointError, match=re.escape(text)):
        call()


def check_damaged_files_are_refused_by_name(rank: int, world: int) -> None:
    """Truncated, missing and foreign files; the module keeps its values."""
    path, _ = saved(rank, world, "damaged")
    model = sharded(seed=9)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    data = next(path.glob("*-rank-0-of-*")) / "__0_0.distcp"
    whole = data.read_bytes()
    dist.barrier()
    if rank == 0:
        data.write_bytes(whole[:100])
    dist.barrier()
    refused(lambda: flat_param.load_sharded(model, path), "__0_0.distcp' has 100 bytes")
    dist.barrier()
    if rank == 0:
        data.unlink()
    dist.barrier()
    refused(lambda: flat_param.load_sharded(model, path), "is missing")
    dist.barrier()
    if rank == 0:
        (path / ".metadata").write_bytes(b"\x80\x04no")
    dist.barrier()
    refused(lambda: flat_param.load_sharded(model, path), "cannot be read")
    refused(lambda: flat_param.load_sharded(model, FOLDER / "nowhere"), "has no .metadata")
    assert_same(dict(model.state_dict()), before)


def check_mismatched_checkpoints_are_refused_by_name(rank: int, world: int) -> None:
    """Another shape or a missing tensor is named, and nothing is loaded."""
    path, _ = saved(rank, world, "mismatched")
    wide = plain(width=8)
    flat_param.fully_shard(wide)
    before = {key: value.clone() for key, value in wide.state_dict().items()}
    refused(lambda: flat_param.load_sharded(wide, path), "'model.embed.weight' has shape (11, 7)")
    deep = plain(depth=4)
    flat_param.fully_shard(deep)
    refused(lambda: flat_param.load_sharded(deep, path), "'model.blocks.3.gain' is not in")
    assert_same(dict(wide.state_dict()), before)


class Hostile:
    """Unpickling it would write a file."""

    def __reduce__(self) -> Any:
        return Path.touch, (FOLDER / "executed",)


def check_hostile_files_are_errors_not_executions(rank: int, world: int) -> None:
    """Neither metadata nor a plain file can run code."""
    path, _ = saved(rank, world, "hostile")
    dist.barrier()
    if rank == 0:
        (path / ".metadata").write_bytes(pickle.dumps(Hostile()))
        torch.save({"embed.weight": Hostile()}, FOLDER / "hostile.pt")
    dist.barrier()
    model = sharded()
    refused(lambda: flat_param.load_sharded(model, path), "Do not trust this file")
    refused(lambda: flat_param.load_sharded(model, FOLDER / "hostile.pt"), "hostile.pt")
    assert not (FOLDER / "executed").exists()


def run(rank: int, world: int, folder: str) -> dict[str, str]:
    """All checks."""
    global FOLDER
    FOLDER = Path(folder)
    return run_checks(globals(), rank, world)


if __name__ == "__main__":
    main(run)
