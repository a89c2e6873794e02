"""Shard over two ranks, save, and resume on one and on three.

    python docs/examples/shard_and_resume.py      # starts torchrun three times

Claim: parameters and Adam's state are on one and on three ranks what they were on two, every bit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

import flat_param


def worker(folder: str) -> None:
    """One rank: resume where there is something to resume from, else train and save."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 36), nn.GELU(), nn.Linear(36, 7))
    flat_param.fully_shard(model[0])
    flat_param.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kept = f"{folder}/whole.pt"
    if os.path.exists(kept):
        flat_param.load_sharded(model, f"{folder}/checkpoint", optimizer=optimizer)
        found, saved = flat_param.full_state_dict(model, optimizer=optimizer), torch.load(kept)
        assert found["optim"].pop("param_groups") == saved["optim"].pop("param_groups")
        torch.testing.assert_close(found, saved, rtol=0, atol=0)
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 24)).square().mean().backward()
        optimizer.step()
    if not os.path.exists(kept):
        flat_param.save_sharded(model, f"{folder}/checkpoint", optimizer=optimizer)
        whole = flat_param.full_state_dict(model, optimizer=optimizer)
        dist.barrier()  # no rank looks for the file after another has written it
        if dist.get_rank() == 0:
            torch.save(whole, kept)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} is done")
    dist.destroy_process_group()


if len(sys.argv) > 1:
    worker(sys.argv[1])
else:
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 1, 3):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            subprocess.run([*torchrun, f"--nproc-per-node={ranks}", __file__, folder], check=True)
    print("claim holds: what 2 ranks saved is on 1 and on 3 ranks the same, every bit")
