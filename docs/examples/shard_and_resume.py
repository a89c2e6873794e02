"""Shard over two ranks, save, and resume on one and on three; compared with FSDP2 and DCP.

    python docs/examples/shard_and_resume.py      # starts torchrun three times

Claim: on one and on three ranks, parameters and Adam's state are bit-identical to those on two.
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kept import in_turn, on_ranks, same, say_files
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as fsdp2

import flat_param


def trained(shard: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model and its optimizer, after a step on this rank's batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 36), nn.GELU(), nn.Linear(36, 7))
    shard(model[0])
    optimizer = torch.optim.AdamW(shard(model).parameters(), lr=0.01)
    model(torch.randn(8 + dist.get_rank(), 24)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def worker(folder: str, job: str) -> None:
    """Run one rank: save or load with both libraries."""
    dist.init_process_group("gloo")
    (model, optimizer), theirs = trained(flat_param.fully_shard), trained(fsdp2)

    def with_dcp(turn: int) -> None:
        weights, adam = get_state_dict(*theirs)
        state = {"model_state_dict": weights, "optim_state_dict": adam}
        getattr(dcp, job)(state, checkpoint_id=f"{folder}/FSDP2 and DCP/{turn}")
        if job == "load":
            set_state_dict(*theirs, **state)

    def with_ours(turn: int) -> None:
        call = getattr(flat_param, f"{job}_sharded")
        call(model, f"{folder}/flat-param/{turn}", optimizer=optimizer)

    times = in_turn({"FSDP2 and DCP": with_dcp, "flat-param": with_ours})
    state = flat_param.full_state_dict(model, optimizer=optimizer)
    if dist.get_rank() == 0:
        say_files(times, folder, f"{job} on {dist.get_world_size()}")
        if job == "save":
            torch.save(state, f"{folder}/state.pt")
        assert same(state, torch.load(f"{folder}/state.pt"))
    dist.destroy_process_group()


if on_ranks(worker, (2, "save"), (1, "load"), (3, "load")):
    print("claim holds: what 2 ranks saved is on 1 and on 3 ranks the same, every bit")
