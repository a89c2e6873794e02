"""Save or load a checkpoint in a process of its own, and report how much memory that took.

Started as `python checkpoint_peak.py <save | async | load> <width>`; prints the bytes of the part,
of its largest tensor, and of the peak beside what was there.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from reshard_peak import peak_bytes
from torch import nn

import flat_param


def trained(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One large layer and eight small ones, with moments."""
    layers = [nn.Linear(2 * width, 2 * width), *(nn.Linear(width, width) for _ in range(8))]
    model = flat_param.fully_shard(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def use(what: str, width: int, path: Path) -> tuple[int, int, int]:
    """Of this part, its largest tensor and the peak."""
    model, optimizer = trained(width)
    if what == "load":
        flat_param.save_sharded(model, path, optimizer=optimizer)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
    before = peak_bytes()
    if what == "save":
        flat_param.save_sharded(model, path, optimizer=optimizer)
    elif what == "async":
        flat_param.async_save_sharded(model, path, optimizer=optimizer).result()
    else:
        flat_param.load_sharded(model, path, optimizer=optimizer)
    sizes = [3 * param.nbytes for param in model.parameters()]
    return sum(sizes), max(sizes) // 3, peak_bytes() - before


def main(what: str, width: str) -> None:
    """A small checkpoint first, for imports, caches and code that runs for the first time."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        use(what, 96, Path(folder, "warm"))
        print(json.dumps(use(what, int(width), Path(folder, "large"))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
