"""Load a checkpoint and report the values of its parameters."""

from __future__ import annotations

import torch
from _harness import main, sharded

import flat_param


def run(rank: int, world: int, path: str, when: str) -> list[float]:
    """Every value that occurs; `when` tells one reading from another."""
    model = sharded(seed=9)
    flat_param.load_sharded(model, path)
    state = model.state_dict()
    return torch.cat([v.flatten() for k, v in state.items() if k != "scale"]).unique().tolist()


if __name__ == "__main__":
    main(run)
