"""A script migrated from FSDP1 by the table of `docs/migrate.md` trains the same weights."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import flat_param

PAGE = Path(__file__).parents[2] / "docs/migrate.md"


class Block(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def build() -> nn.Module:
    """Build a model with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 2))


SCALES, SCALES_NOT = 0.1, 100.0
"""Norms to clip to. They are summed in another order: a last bit is the processor's choice."""


def train(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> list[float]:
    """Train three steps of two batches each with methods of both libraries; return norms."""
    norms = []
    for step in range(3):
        for batch in range(2):
            torch.manual_seed(100 * step + 10 * batch + dist.get_rank())
            with model.no_sync() if batch == 0 else contextlib.nullcontext():
                model(torch.randn(4, 8)).square().mean().backward()
        norms.append(float(model.clip_grad_norm_(max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


Checkpoint = dict[str, Any]


def before(saved: Checkpoint | None, max_norm: float = SCALES_NOT) -> Checkpoint:
    """Return FSDP1's weights, optimizer state and norms, of a new or a resumed run."""
    model = FullyShardedDataParallel(
        build(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # Without offload_to_cpu=False, on the CPU, all values of a state are those gathered last.
    configs = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)
    whole = functools.partial(
        FullyShardedDataParallel.state_dict_type, model, StateDictType.FULL_STATE_DICT, *configs
    )
    if saved:
        with whole():
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(
                FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved["optim"])
            )
    norms = train(model, optimizer, max_norm)
    with whole():
        optim = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        return {"model": model.state_dict(), "optim": optim, "norms": norms}


def after(saved: Checkpoint | None, max_norm: float = SCALES_NOT) -> Checkpoint:
    """Do the same with flat-param, converting each argument by the table."""
    model = build()
    for module in list(model.modules()):
        if isinstance(module, Block):
            flat_param.fully_shard(module, reshard_after_forward=False)
    flat_param.fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if saved:
        flat_param.load_full_state_dict(model, saved, optimizer=optimizer)
    norms = train(model, optimizer, max_norm)
    return {**flat_param.full_state_dict(model, optimizer=optimizer), "norms": norms}


def values(found: Mapping[str, Any]) -> dict[str, Tensor]:
    """Yield every tensor of a checkpoint with its path of keys."""
    flat: dict[str, Tensor] = {}
    for key, value in found.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}/{below}": tensor for below, tensor in values(value).items()}
        elif isinstance(value, Tensor):
            flat[key] = value
    return flat


def assert_same_bits(theirs: Checkpoint, ours: Checkpoint) -> None:
    """Assert weights in the same order, and the same optimizer state for each."""
    assert list(theirs["model"]) == list(ours["model"])
    old, new = values(theirs), values(ours)
    assert set(old) == set(new)
    assert [name for name, value in old.items() if not torch.equal(new[name], value)] == []


def assert_clipped_alike(theirs: Checkpoint, ours: Checkpoint) -> None:
    """Assert equality up to one bit of the norms and its effect on weights and state."""
    torch.testing.assert_close(theirs["norms"], ours["norms"], rtol=2**-22, atol=0)
    assert min(ours["norms"]) > SCALES
    torch.testing.assert_close(values(theirs), values(ours), rtol=1e-5, atol=1e-7)


def worker() -> None:
    """Run one of two ranks."""
    dist.init_process_group("gloo")
    theirs, ours = before(None), after(None)
    assert_same_bits(theirs, ours)
    assert_clipped_alike(before(None, SCALES), after(None, SCALES))
    assert not torch.equal(ours["model"]["2.bias"], build()[2].bias)  # training changed the weights
    state = ours["optim"]["state"]["2.bias"]
    assert not torch.equal(state["exp_avg"], state["exp_avg_sq"])
    assert_same_bits(before(ours), after(theirs))  # each resumes from the other's checkpoint
    print("migrated", flush=True)
    dist.destroy_process_group()


@pytest.mark.nightly
def test_two_ranks_train_the_same_bits() -> None:
    """Weights and optimizer state by name, with accumulation; resumed both ways, too."""
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node=2", __file__],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("migrated") == 2


def table(section: str) -> str:
    """Return the page's table of one library."""
    return PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]


def arguments(*calls: object) -> set[str]:
    """Return argument names, without the module and untyped ones."""
    return {name for call in calls for name in inspect.signature(call).parameters} - {"module"}


def methods(owner: type) -> set[str]:
    """Return the methods that a plain module lacks."""
    return {name for name in dir(owner) if not name.startswith("_")} - set(dir(nn.Module))


def test_every_name_of_fsdp1_is_in_its_table() -> None:
    """Arguments and methods by name."""
    said = table("FSDP1")
    given = arguments(FullyShardedDataParallel, MixedPrecision, CPUOffload)
    given |= arguments(FullyShardedDataParallel.summon_full_params) & {"writeback"}
    assert {name for name in given if not re.search(rf"\b{name}=", said)} == set()
    asked = methods(FullyShardedDataParallel) | {one.name for one in ShardingStrategy}
    asked |= {one.name for one in StateDictType} | {one.name for one in BackwardPrefetch}
    assert {name for name in asked if not re.search(rf"\b{name}\b", said)} == set()


def test_every_name_of_fsdp2_is_in_its_table() -> None:
    """As for FSDP1; a newer torch may add names."""
    said = table("FSDP2")
    given = arguments(fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy)
    assert {name for name in given if not re.search(rf"\b{name}=", said)} == set()
    missing = {name for name in methods(FSDPModule) if not re.search(rf"\b{name}\b", said)}
    assert missing == set()


if __name__ == "__main__":
    worker()
