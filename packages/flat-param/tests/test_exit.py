"""What a process waits for when it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

START = """
import atexit, gc, os, time
import torch, torch.distributed as dist
from torch import nn
from weakref import ref

def gloo_threads():
    found = 0
    for task in os.listdir("/proc/self/task"):
        try:
            found += "gloo" in open(f"/proc/self/task/{task}/comm").read()
        except OSError:  # it has just ended
            pass
    return found

def at_exit():  # registered first, so it runs last
    until = time.monotonic() + 3  # the system may list a thread a moment longer than it runs
    while gloo_threads() and time.monotonic() < until:
        time.sleep(0.02)
    print("at exit", gloo_threads(), world() is not None)

atexit.register(at_exit)
import flat_param
from flat_param.handle import FlatParamHandle, HandleShardingStrategy
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
world = ref(dist.group.WORLD)
model = nn.Linear(4, 4)
"""
SHARDED = """
flat_param.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
if not gloo_threads():
    print("no names", flush=True)
    os._exit(0)
"""
HANDLE = """
other = nn.Linear(4, 4)
handle = FlatParamHandle(list(other.parameters()), other, process_group=dist.group.WORLD,
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
    # Older gloo says there how many ranks it has connected.
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    if lines[-1:] == ["no names"]:
        pytest.skip("torch 2.9 gives gloo's threads no names")
    return lines


@needs_proc
@pytest.mark.nightly
def test_destroyed_groups_end_before_the_interpreter() -> None:
    """The models are global variables, which the interpreter clears only after its threads."""
    assert _lines(START + SHARDED + HANDLE + DESTROYED) == ["at exit 0 False"]


@needs_proc
@pytest.mark.nightly
def test_groups_that_were_not_destroyed_stay() -> None:
    """Others may still use them; torch itself says what is missing."""
    (line,) = _lines(START + SHARDED)
    assert line.startswith("at exit ")
    assert not line.endswith(" 0 False")
    assert line.endswith(" True")


SAVES = """
import sys
flat_param.fully_shard(model)
flat_param.async_save_sharded(model, sys.argv[1])
time.sleep(0.1)
flat_param.async_save_sharded(model, "/dev/null/none")
raise KeyboardInterrupt
"""


def test_interpreter_waits_for_asynchronous_saves(tmp_path: Path) -> None:
    """Its end, by Ctrl-C too, comes after the saves; the error of one is logged."""
    script = START.replace("atexit.register(at_exit)", "") + SAVES
    command = [sys.executable, "-c", script, str(tmp_path / "saved")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (tmp_path / "saved/.metadata").exists(), found.stderr
    told = "the save to '/dev/null/none' failed: flat_param.save_sharded: rank 0 cannot write"
    assert told in found.stderr
    assert "KeyboardInterrupt" in found.stderr
