"""`torch.distributed.checkpoint` reads flat-param's checkpoints, and the other way round.

    python docs/examples/dcp_beside.py            # starts torchrun

Claim: with blocks in `checkpoint_`, FSDP2's checkpoint loads into flat-param's shards, and
flat-param's into FSDP2 and into a plain model by `dcp.load`; names are plain, values bit-identical.
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kept import differing, in_turn, on_ranks, same, say_files
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2

import flat_param
from ckpt_wrap import checkpoint_


def build(seed: int) -> nn.Sequential:
    """Three checkpointed blocks and a head."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*map(checkpoint_, blocks), nn.Linear(16, 4))


def worker(folder: str, _: str) -> None:
    """Run one rank: both libraries save, then each reads the other's files."""
    dist.init_process_group("gloo")
    theirs, ours, plain = fsdp2(build(0)), flat_param.fully_shard(build(1)), build(2)
    state = {"model": theirs.state_dict()}
    saves = {
        "FSDP2": lambda turn: dcp.save(state, checkpoint_id=f"{folder}/FSDP2/{turn}"),
        "flat-param": lambda turn: flat_param.save_sharded(ours, f"{folder}/flat-param/{turn}"),
    }
    loads = {
        "FSDP2": lambda turn: dcp.load(state, checkpoint_id=f"{folder}/flat-param/{turn}"),
        "flat-param": lambda turn: flat_param.load_sharded(ours, f"{folder}/FSDP2/{turn}"),
    }
    saved, loaded = in_turn(saves), in_turn(loads)
    dcp.load({"model": plain.state_dict()}, checkpoint_id=f"{folder}/flat-param/0")
    from_theirs = flat_param.full_state_dict(ours)["model"]
    from_ours = [{n: t.full_tensor() for n, t in theirs.state_dict().items()}, plain.state_dict()]
    assert same(from_theirs, build(0).state_dict())
    assert all(same(found, build(1).state_dict()) for found in from_ours)
    for model in (plain, right := build(1)):
        model(torch.ones(8, 16)).square().mean().backward()
    assert not differing(plain, right)
    if dist.get_rank() == 0:
        say_files(saved, folder, "save")
        say_files(loaded, folder, "load the other's")
    dist.destroy_process_group()


if on_ranks(worker, (2, "")):
    print("claim holds: what each saved, the other and a plain model read; gradients equal")
