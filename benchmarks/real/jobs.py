"""What one run measures: models, batch shapes and the selected ways."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from . import ways as registry
from .models import MODELS, Shape
from .ways import Registered


@dataclass(frozen=True)
class Job:
    """One model and batch shape, run in some ways.

    Attributes:
        name: of the model.
        shape: of the model.
        batch: sequences, and tokens of each.
        ways: selected, see `--list`.
        rounds: timed steps of each way.
        seconds: after this time no round starts, and no way after three quarters of it.
    """

    name: str
    shape: Shape
    batch: tuple[int, int]
    ways: list[Registered]
    rounds: int
    seconds: float


def selected(patterns: str) -> list[Registered]:
    """Return the selected ways, with the first way of each group: ratios are to it.

    Raises:
        SystemExit: a pattern matches nothing.
    """
    chosen: set[str] = set()
    for pattern in (one.strip() for one in patterns.split(",")):
        excludes, text = pattern.startswith("!"), pattern.removeprefix("!")
        found = {
            one.name
            for one in registry.WAYS
            if fnmatchcase(one.name, text) or fnmatchcase(one.group, text)
        }
        if not found:
            sys.exit(f"benchmarks.real: no way or group matches {text!r}; --list shows all of them")
        chosen = chosen - found if excludes else chosen | found
    groups = {one.group for one in registry.WAYS if one.name in chosen}
    first = {one.group: one.name for one in reversed(registry.WAYS)}
    return [one for one in registry.WAYS if one.name in {*chosen, *map(first.get, groups)}]


def batch_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Parse "2x4096" or "8192,32768"."""
    pairs = []
    for part in text.split(","):
        sequences, _, length = part.rpartition("x")
        pairs.append((int(sequences or 1), int(length)))
    return tuple(pairs)


_THEIRS = (
    "plain,transformers,transformers every_n_layers=2,transformers offload=True,torch SAC,"
    "torch_remat,TRL offload,"
)
_OURS = (
    "checkpoint_,checkpoint_layers_ every=2,checkpoint_ and offload_,checkpoint_ and in_slices,"
    "sac_policies matmuls,"
)
_COMPILED = ",compiled plain,compiled torch budget *,compiled sac_policies matmuls"
_LOSSES = "checkpoint_ and TRL loss,checkpoint_ and Liger loss,"
_ALL = f"{_THEIRS}{_OURS}{_LOSSES}sac_policies nothing kept,fit_ *"
# At 32k tokens a step of 8 layers takes more than a second.
_FEW = f"{_THEIRS}{_OURS}fit_ 75%,fit_ 50%,fit_ smallest"
_MIXTURE = (
    "plain,transformers,torch SAC,checkpoint_,checkpoint_ and offload_,sac_policies matmuls,"
    "sac_policies nothing kept"
)
# Model, batch, ways and seconds.
FRONT_PAGE: dict[str, tuple[tuple[str, tuple[int, int], str, float], ...]] = {
    "": (
        ("1b-128k", (1, 4096), _ALL + _COMPILED, 130),
        ("8b-layers", (1, 8192), _ALL + _COMPILED, 140),
        ("8b-layers", (1, 32768), _FEW, 180),
    ),
    "toy": (("toy-vocabulary", (2, 128), _ALL, 200), ("toy", (1, 256), _FEW, 200)),
    "moe": (("qwen3-moe", (1, 4096), _MIXTURE, 240),),
    "toy moe": (("toy-moe", (2, 64), _MIXTURE, 200),),
}
# A second forward draws other noise, so it chooses and trains other experts.
RUNS_ONCE = ("plain", "sac_policies *")


def front_page(toy: bool, moe: bool) -> list[Job]:
    """Return the jobs behind the figure of the front page."""
    kind = " ".join(filter(None, ("toy" * toy, "moe" * moe)))
    return [
        Job(
            name,
            replace(MODELS[name], optimizer=True),
            batch,
            selected(ways),
            rounds=2 if toy else 5,
            seconds=seconds,
        )
        for name, batch, ways, seconds in FRONT_PAGE[kind]
    ]


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Return one job for each batch shape."""
    if options.front_page:
        return front_page(options.toy, options.moe)
    name = options.model or ("1b" if torch.accelerator.is_available() else "toy")
    shape = MODELS[name]
    batches = options.tokens or shape.batches
    seconds = (options.seconds_limit or shape.seconds_limit) / len(batches)
    ways, rounds = selected(options.ways or shape.ways), options.rounds or shape.rounds
    return [Job(name, shape, batch, ways, rounds, seconds) for batch in batches]
