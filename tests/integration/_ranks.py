"""Claims about several processes; those of one file and world size share a launch."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("_worker.py")
WAYS = ("zero3", "zero2", "replicated")
# The job, which is a function of `_worker.py`, and its arguments.
Claim = tuple[str, ...]
LAYERS: list[Claim] = [
    ("layers", name, over) for name in ("Llama", "GPT-2") for over in ("ddp", "fsdp2")
]
SHARDED_LAYERS: list[Claim] = [("layers", "Llama", over) for over in WAYS]
SHARDING: list[Claim] = [
    ("sharding", name, over) for name in ("Llama", "GPT-2", "BERT") for over in WAYS
]
SAVING: list[Claim] = [("saving", "Llama"), ("saving", "GPT-2")]
LORA: list[Claim] = [("lora", "Llama")]
TRACKED: list[Claim] = [("tracked", "Llama", over) for over in ("ddp", "fsdp2", "zero3")]
ACCELERATE: list[Claim] = [("by_accelerate", "Llama")]
LIGHTNING: list[Claim] = [("by_lightning", "Llama")]
SCHEDULES = (
    *("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS"),
    "ScheduleInterleavedZeroBubble",
)
LIBRARIES: list[Claim] = [
    *(("pipeline", name) for name in SCHEDULES),
    *(("accelerate_plugin", kind) for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT")),
    ("accelerate_alone",),
    ("trainer", "fsdp2"),
    ("trainer", "alone"),
    ("lightning_resume", "shards"),
    ("lightning_resume", "file"),
    ("peft_adapters", "lora"),
    ("peft_adapters", "dora"),
    ("save_pretrained",),
]
CLAIMS = LAYERS + SHARDED_LAYERS + SHARDING + SAVING + LORA + TRACKED + ACCELERATE + LIGHTNING
CLAIMS += LIBRARIES
worlds = pytest.mark.parametrize("world", [1, 2, 3])


def claims(wanted: list[Claim]) -> pytest.MarkDecorator:
    """Parametrize a test with these claims."""
    return pytest.mark.parametrize("claim", wanted, ids=["-".join(claim) for claim in wanted])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@functools.cache
def results_of(world: int, *jobs: Claim, timeout_s: int = 1200) -> list[dict[str, str]]:
    """Run these claims on every rank; return each rank's results by claim.

    A claim that ended a rank early has the result "", so earlier results are kept.
    """
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "integration",  # as under torchrun, which Lightning checks
    }
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(rank) for rank in range(world)]
        ranks = []
        for rank, file in enumerate(files):
            with file.with_suffix(".log").open("w") as log:
                started = subprocess.Popen(
                    [sys.executable, str(WORKER), folder, *map("-".join, jobs)],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            ranks.append(started)
        try:
            for process in ranks:
                process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass  # finished results are in the ranks' files
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        found = []
        for file in files:
            lines = file.read_text().splitlines() if file.exists() else []
            rest = file.with_suffix(".log").read_text()[-3000:]
            found.append(dict(map(json.loads, lines)) | {"": rest})
    return found


def check(world: int, claim: Claim, among: list[Claim]) -> None:
    """Fail with a rank's result, unless the claim held on every rank."""
    for rank, found in enumerate(results_of(world, *among)):
        outcome = found.get("-".join(claim))
        if outcome is not None and outcome.startswith("skipped: "):
            pytest.skip(outcome.removeprefix("skipped: "))
        if outcome is None:
            pytest.fail(f"rank {rank} did not come to {claim}:\n{found['']}")
        assert outcome == "held", f"rank {rank} of {world}, {claim}:\n{outcome}"
