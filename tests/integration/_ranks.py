"""Claims about several processes; those of one file and world size share a launch."""

from __future__ import annotations

import atexit
import functools
import tempfile
from pathlib import Path

import pytest
from _cases import CASES

from torchparts_conformance.ranks import Ranks

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
    ("generate",),
    ("save_pretrained",),
]
MODELS: list[Claim] = [("any_model", case.name) for case in CASES]
worlds = pytest.mark.parametrize("world", [1, 2, 3])


def claims(wanted: list[Claim]) -> pytest.MarkDecorator:
    """Parametrize a test with these claims."""
    return pytest.mark.parametrize("claim", wanted, ids=["-".join(claim) for claim in wanted])


@functools.cache
def _ranks() -> Ranks:
    ranks = Ranks("transformers", "flat_param", "sac_policies", "mod_tracker")
    atexit.register(ranks.close)
    return ranks


@functools.cache
def results_of(world: int, *jobs: Claim) -> list[dict[str, str]]:
    """Run these claims on every rank; return each rank's results by claim."""
    with tempfile.TemporaryDirectory() as folder:
        return _ranks()(world, f"{WORKER}::outcomes", folder, jobs, timeout_s=1200)


def check(world: int, claim: Claim, among: list[Claim]) -> None:
    """Fail with a rank's result, unless the claim held on every rank."""
    for rank, found in enumerate(results_of(world, *among)):
        outcome = found["-".join(claim)]
        if outcome.startswith("skipped: "):
            pytest.skip(outcome.removeprefix("skipped: "))
        assert outcome == "held", f"rank {rank} of {world}, {claim}:\n{outcome}"
