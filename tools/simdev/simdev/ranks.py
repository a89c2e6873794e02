"""Run functions in several processes, each with its own simulated devices, in one process group."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 300  # for machines under load


def on_ranks(
    function: Callable[..., Any],
    *args: Any,
    size: int = 2,
    timeout_s: float = 20,
    limit_s: float = LIMIT_S,
) -> list[Any]:
    """Return the results of `function(rank, *args)` by rank.

    Args:
        function: from a file that can be imported alone, under any module name.
        args: picklable; results must be picklable, too.
        size: number of ranks.
        timeout_s: of collectives, in seconds.
        limit_s: of the whole, in seconds.

    Raises:
        AssertionError: a rank raised or did not end; the message has its traceback.
    """
    context = multiprocessing.get_context("spawn")
    # Bind to port 0, so that the system chooses a port: another program might take a port that was
    # chosen earlier.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = (sys.modules[function.__module__].__file__, function.__name__)
    pipes, ranks = [], []
    for rank in range(size):
        mine, theirs = context.Pipe()
        given = (theirs, where, rank, size, store.port, timeout_s, args)
        ranks.append(context.Process(target=_rank, args=given, daemon=True))
        pipes.append(mine)
    for each in ranks:
        each.start()
    try:
        answers = [_answer(pipe, limit_s) for pipe in pipes]
    finally:
        for each in ranks:
            each.join(2)
            each.kill()
    told = [f"rank {rank}: {what}" for rank, (fine, what) in enumerate(answers) if not fine]
    assert not told, "\n".join(told)
    return [what for _, what in answers]


def _answer(pipe: Any, limit_s: float) -> tuple[bool, Any]:
    if not pipe.poll(limit_s):
        return False, f"did not end within {limit_s} s"
    return pipe.recv()


def _rank(
    pipe: Any, where: Any, rank: int, size: int, port: int, timeout_s: float, args: Any
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port)
        _all_come(store, "begin", size)
        limit = timedelta(seconds=timeout_s)
        dist.init_process_group("simccl", store=store, rank=rank, world_size=size, timeout=limit)
        told = _load(*where)(rank, *args)
        pipe.send((True, told))
        _all_come(store, "end", size)  # a rank that exits closes its connections
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # threads of streams are still running


def _all_come(store: dist.Store, place: str, size: int) -> None:
    store.add(place, 1)
    while store.add(place, 0) < size:
        time.sleep(0.01)


def _load(path: str, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("ranks_of_" + os.path.basename(path)[:-3], path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)
