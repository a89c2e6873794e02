"""`torch.distributed.checkpoint` reads what flat-param saved, and the other way round.

    python docs/examples/dcp_beside.py            # starts torchrun

Claim: with blocks in `checkpoint_`, FSDP2's checkpoint loads into flat-param's shards, and
flat-param's into a plain model by `dcp.load`; names stay plain, and every bit is the same.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2

import flat_param
from ckpt_wrap import checkpoint_


def build(seed: int) -> nn.Sequential:
    """Three checkpointed blocks and a head."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*map(checkpoint_, blocks), nn.Linear(16, 4))


def worker(folder: str) -> None:
    """One rank: from FSDP2 through DCP to flat-param, and from there through DCP to plain."""
    dist.init_process_group("gloo")
    right = build(0).state_dict()
    theirs, ours, plain = fsdp2(build(0)), build(1), build(2)
    dcp.save({"model": theirs.state_dict()}, checkpoint_id=f"{folder}/fsdp2")
    flat_param.fully_shard(ours)
    flat_param.load_sharded(ours, f"{folder}/fsdp2")
    flat_param.save_sharded(ours, f"{folder}/flat-param")
    dcp.load({"model": plain.state_dict()}, checkpoint_id=f"{folder}/flat-param")
    states = (flat_param.full_state_dict(ours)["model"], plain.state_dict())
    assert all(list(state) == list(right) for state in states)
    assert all(torch.equal(state[name], right[name]) for state in states for name in right)
    if dist.get_rank() == 0:
        for path in Path(folder).rglob("*.distcp"):
            print(f"{path.relative_to(folder)}: {path.stat().st_size:,} bytes")
        print(f"claim holds: {len(right)} weights went both ways and are equal, every bit")
    dist.destroy_process_group()


if len(sys.argv) > 1:
    worker(sys.argv[1])
else:
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        subprocess.run([*torchrun, "--nproc-per-node=2", __file__, folder], check=True)
