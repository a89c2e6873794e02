"""A model on two ranks, sharded by flat-param and under DDP, in forked processes."""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from _models import Case
from _parts import DiffersError, Part, compare, enlarged
from _ranks import free_port
from _ways import OVER
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flat_param

STEPS = 3


def train(case: Case, model: nn.Module) -> None:
    """Train some steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        case.loss(model).backward()
        optimizer.step()


def rank(case: Case, number: int, port: int) -> dict[str, Any]:
    """Run one rank: ranks have different batches, and parameters are compared on each."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=number,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    own = enlarged(case, shift=number)
    plain, model = case.build(), case.build()
    whole = sum(param.numel() for param in plain.parameters())
    model = OVER["zero3"](case, model)
    mine = sum(param.numel() for param in model.parameters())
    train(own, DistributedDataParallel(plain, find_unused_parameters=True))
    train(own, model)
    state = flat_param.full_state_dict(model)["model"]
    compare(
        (f"{name} after {STEPS} steps", state[name], param.detach())
        for name, param in plain.named_parameters()
    )
    dist.destroy_process_group()
    return {"share": mine / whole}


def ranks(part: Part, case: Case, model: nn.Module, plain: nn.Module) -> dict[str, Any]:
    """Run both ranks; this process is the first."""
    port = free_port()
    other = multiprocessing.get_context("fork").Process(target=rank, args=(case, 1, port))
    other.start()
    found = rank(case, 0, port)
    other.join(60)
    if other.exitcode != 0:
        raise DiffersError(f"the second rank ended with {other.exitcode}")
    return found
