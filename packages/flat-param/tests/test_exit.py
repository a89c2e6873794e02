"""When the interpreter ends, no thread of a destroyed process group is left that could need it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

START = """
import atexit, gc, os
import torch, torch.distributed as dist
from torch import nn
from weakref import ref
import flat_param
from flat_param import FlatParamHandle, HandleShardingStrategy

def gloo_threads():
    tasks = "/proc/self/task"
    names = [open(f"{tasks}/{task}/comm").read() for task in os.listdir(tasks)]
    return sum("gloo" in name for name in names)

atexit.register(lambda: print("at exit", gloo_threads(), world() is not None))  # runs last
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
world = ref(dist.group.WORLD)
model = nn.Linear(4, 4)
"""
SHARDED = """
flat_param.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
assert gloo_threads()
"""
HANDLE = """
handle = FlatParamHandle(list(model.parameters()), model, process_group=dist.group.WORLD,
                         sharding_strategy=HandleShardingStrategy.FULL_SHARD)
handle.shard()
torch.optim.AdamW([handle.flat_param])
"""
DESTROYED = "dist.destroy_process_group()\n"

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="threads have names there"
)


def _lines(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.splitlines()


@needs_proc
@pytest.mark.parametrize("use", [SHARDED, HANDLE], ids=["fully_shard", "FlatParamHandle"])
def test_destroyed_groups_end_before_the_interpreter(use: str) -> None:
    """The model is a global variable, which the interpreter clears only after its threads."""
    assert _lines(START + use + DESTROYED) == ["at exit 0 False"]


@needs_proc
def test_groups_that_were_not_destroyed_stay() -> None:
    """Others may still use them; torch itself says what is missing."""
    (line,) = _lines(START + SHARDED)
    assert line.startswith("at exit ")
    assert not line.endswith(" 0 False")
    assert line.endswith(" True")


@needs_proc
def test_the_second_group_ends_with_its_users() -> None:
    """A process that shards, destroys and starts again keeps no threads of the first time."""
    script = """
before = gloo_threads()
import torch.distributed.nn.functional  # keeps the default group, whoever imports it
flat_param.fully_shard(model)
both = gloo_threads()
del model
gc.collect()
dist.destroy_process_group()
print(before > 0, both == 2 * before, gloo_threads() == before)
"""
    assert _lines(START + script)[0] == "True True True"
