"""Save a sharded module and its optimizer with torch.distributed.checkpoint.

An asynchronous save writes in a non-daemon thread, so the interpreter waits for it. The next save
also waits for it, so there is one snapshot at a time, and ranks save in the order of their calls.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .._errors import CheckpointError
from ..layout._arguments import check_is_module, path_of
from ..sharded.tensor._nested import map_tensors
from ..sharded.unit._by_hand import units_at_rest, units_below
from ..sharded.unit._strays import check_strays
from ._optim_state import named_optimizer_state
from ._state_dict import copied
from ._world import World

_log = logging.getLogger("flat_param")
_last: list[Future[None]] = []


def save_sharded(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    step: int | None = None,
) -> None:
    """Write a checkpoint in torch.distributed.checkpoint's format, each rank its part. Collective.

    Any number of ranks can load it, also with FSDP2. The previous checkpoint in `path` stays intact
    until all parts are on disk, and is then replaced atomically. Then its files are deleted, and no
    others: `path` may have other checkpoints inside. A save that was killed leaves its folder
    `save-<word>`. An error on one rank is an error on all. Only one job at a time may save to a
    path.

    Args:
        module: sharded.
        path: a folder that all ranks can access.
        optimizer: of the module.
        step: of the training loop; ranks must save the same one. By default ranks compare the
            number of optimizer steps on the module's parameters.

    Raises:
        CheckpointError: a part cannot be written, ranks are at different steps, or another rank
            has failed.
        StateError: the module is not sharded, or optimizer state cannot be cut.
    """
    _prepare(module, path, optimizer, step, snapshot=False)()


def async_save_sharded(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    step: int | None = None,
) -> Future[None]:
    """Write a checkpoint in a thread, while training continues. Collective.

    Takes the arguments of `save_sharded`, and raises its errors before it returns or in the future.

    Copies this rank's part to host memory and returns; later changes are not in the checkpoint. A
    process has one save at a time: the next one, asynchronous or not, waits for it. The
    interpreter does not exit before it has finished.

    Returns:
        A future with the errors of `save_sharded`. An error is also logged when it happens.
    """
    write = _prepare(module, path, optimizer, step, snapshot=True)
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # cannot be cancelled, since other ranks write too

    def run() -> None:
        try:
            write()
        except BaseException as error:
            _log.error("flat_param.async_save_sharded: the save to '%s' failed: %s", path, error)
            future.set_exception(error)
        else:
            future.set_result(None)

    _last[:] = [future]
    threading.Thread(target=run, name=f"save to {path}").start()
    return future


def _prepare(
    module: nn.Module,
    path: str | os.PathLike[str],
    optimizer: Optimizer | None,
    step: int | None,
    *,
    snapshot: bool,
) -> Callable[[], None]:
    """Agree on the state to save, and return the function that writes it. Both are collective."""
    check_is_module("save_sharded", module)
    path = path_of("save_sharded", path)
    state: dict[str, Any] = {}
    world = World(module, "save_sharded")
    with world.agreed():
        wait(_last)
        units_at_rest(module)  # refuses copies that whole_params shows
        if hasattr(module, "_flat_param"):  # parameters outside of units may have other owners
            check_strays("save_sharded", module, units_below(module))
        state["model"] = module.state_dict()
        if optimizer is not None:
            state["optim"] = named_optimizer_state(module, optimizer)
        if snapshot:
            state = map_tensors(state, partial(copied, device="cpu"))
    word = uuid.uuid4().hex[:12]
    parts = [part for unit in units_below(module) for part in unit.parts]
    now = [part.pieces[0].segment.steps for part in parts] if step is None else step
    notes = world.comm.share((os.fspath(path), now, word))
    for rank, note in zip(world.ranks, notes, strict=True):
        advice = "Call it after the same step on all ranks, or pass step="
        for what, at, cure in (("path", 0, "Pass the same path on all ranks"), ("step", 1, advice)):
            if note[at] != notes[0][at]:
                raise CheckpointError(
                    f"flat_param.save_sharded: the {what} is {_short(notes[0][at])} on rank "
                    f"{world.ranks[0]} and {_short(note[at])} on rank {rank}, but all ranks must "
                    f"save one state. {cure}."
                )
    writers = world.for_thread() if snapshot else world
    return lambda: _write(state, path, notes[0][2], writers)


def _short(told: Any) -> Any:
    return max(told, default=0) if isinstance(told, list) else told


def _write(state: dict[str, Any], path: Path, word: str, world: World) -> None:
    """Write and commit a state. Collective.

    The steps are those of torch's `save`, which sends plans by `gather_object`: that needs numpy,
    and hangs at an error that does not pickle.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from ._files import CheckedWriter

    # If several ranks have a value, the first rank saves it.
    writer, planner = CheckedWriter(path, word), DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    metadata: list[Any] = []

    def plan() -> Any:
        planner.set_up_planner(state, writer.storage_meta(), world.is_first)
        writer.set_up_storage_writer(world.is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def divide(plans: list[Any]) -> Any:
        divided, whole = planner.create_global_plan(plans)
        metadata.append(whole)
        return writer.prepare_global_plan(divided)

    def write(plans: list[Any]) -> Any:
        own = planner.finish_plan(plans[world.comm.rank])
        return writer.write_data(own, planner).wait()

    def commit(written: list[Any]) -> None:
        if world.is_first:
            writer.finish(metadata[0], written)

    try:
        plans = _on_all(world, path, plan)
        (divided, *_) = _on_all(world, path, lambda: divide(plans) if world.is_first else None)
        written = _on_all(world, path, lambda: write(divided))
        # No rank returns before the checkpoint is complete.
        _on_all(world, path, lambda: commit(written))
    except CheckpointError:
        if world.is_first:
            writer.remove()
        raise
    finally:
        state.clear()  # a traceback would keep the snapshot alive
    if world.is_first:
        writer.remove_replaced()


def _on_all(world: World, path: Path, step: Callable[[], Any]) -> list[Any]:
    """Run a step on all ranks, and return the results of all. Collective."""
    result, failed, told = None, None, ""
    try:
        result = step()
    except Exception as raised:
        failed, told = raised, f"{type(raised).__name__}: {raised}"
    notes = world.comm.share((result, told))
    for rank, (_, told) in zip(world.ranks, notes, strict=True):
        if told:
            raise CheckpointError(
                f"flat_param.save_sharded: rank {rank} cannot write its part to '{path}' ({told}). "
                "Nothing was saved, and an earlier checkpoint there is intact. Make room, or save "
                "to another path."
            ) from failed
    return [result for result, _ in notes]
