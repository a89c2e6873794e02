"""Save a small and a wide model with their moments, and cut the wide one for four ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from _harness import main
from torch import nn

import flat_param


def save(path: Path, width: int) -> None:
    """One tensor of `4 * width**2` elements and eight of a quarter of it."""
    model = nn.Sequential(
        nn.Embedding(4 * width, width), *(nn.Linear(width, width) for _ in range(8))
    )
    flat_param.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    flat_param.save_sharded(model, path, optimizer=optimizer)


def run(rank: int, world: int, folder: str, width: int) -> None:
    """Three checkpoints: `small`, `wide-1` and `wide-4`."""
    save(Path(folder, "small"), 64)  # wide enough for all code that the other one runs
    save(Path(folder, "wide-1"), width)
    flat_param.reshard_checkpoint(f"{folder}/wide-1", f"{folder}/wide-4", world_size=4)


if __name__ == "__main__":
    main(run)
