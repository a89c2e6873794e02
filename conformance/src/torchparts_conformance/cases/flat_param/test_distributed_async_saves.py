"""Saves that overlap with training, on two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._sharded import batch, distance, loss_of, mine, sharded


def _whole(part: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    state = part.full_state_dict(model, optimizer=optimizer)
    moments = state["optim"]["state"]
    found = {f"{n}.{key}": value for n in moments for key, value in moments[n].items()}
    return {key: torch.as_tensor(v).clone() for key, v in {**state["model"], **found}.items()}


def _step(model: Any, optimizer: Any, rank: int, world_size: int) -> None:
    loss_of(model, mine(batch(world_size), rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _trained_meanwhile(part: Any, rank: int, world_size: int, folder: str) -> list[Any]:
    model, loaded = sharded(part), sharded(part, 5)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, loaded)]
    for each in zip((model, loaded), optimizers, strict=True):
        _step(*each, rank, world_size)
    before = _whole(part, model, optimizers[0])
    future = part.async_save_sharded(model, folder, optimizer=optimizers[0])
    _step(model, optimizers[0], rank, world_size)
    moved = distance(_whole(part, model, optimizers[0]), before) > 0
    future.result()
    done = future.done()
    dist.barrier()
    part.load_sharded(loaded, folder, optimizer=optimizers[1])
    return [moved, done, distance(_whole(part, loaded, optimizers[1]), before)]


@requirement(
    "FP-230",
    "`async_save_sharded` MUST save the parameters and optimizer state at the time of the call, "
    "even if training continues, and its future MUST finish when `save_sharded` would return.",
    rationale="a late or missing copy mixes two steps, and no checksum shows it",
    profile="distributed",
)
def test_async_save_has_the_state_of_its_call(part, ranks, tmp_path):
    """A step after the call, before the save has ended, is not saved."""
    assert ranks(2, _trained_meanwhile, str(tmp_path / "saved")) == [[True, True, 0.0]] * 2
