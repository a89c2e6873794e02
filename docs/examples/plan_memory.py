"""Plan how a model's step fits a memory limit: which blocks, which policy, offload, how many ranks.

    python docs/examples/plan_memory.py --limit "80 MiB"

Predicts the memory of a rank for every number of blocks and ranks, from two blocks. Recommends the
cheapest choice that fits, applies it, and measures bytes and time in turns with the plain model.
`--json FILE` writes the figures. For your own model, write a function like `example` and pass it as
`--model file.py:function`.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import platform
import runpy
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kept import kept_bytes
from torch import Tensor, nn
from train_gpt import GPT, Config

import sac_policies
from ckpt_wrap import checkpoint_, offload_, unwrap
from flat_param.plan import plan_training, unit_shapes

PRODUCTS = sac_policies.save_ops(sac_policies.MATMULS, sac_policies.ATTENTION)
# Cheapest first: each keeps fewer bytes than the one before and takes longer.
WAYS: dict[str, Callable[[nn.Module, str], object]] = {
    "keep products, recompute the rest": lambda block, folder: checkpoint_(
        block, checkpoint_fn=sac_policies.checkpoint, policy=PRODUCTS
    ),
    "checkpoint": lambda block, folder: checkpoint_(block),
    "checkpoint and offload": lambda block, folder: offload_(checkpoint_(block), to=folder),
}
PLAIN = "as it is"
RANKS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Choice:
    """A change of the first blocks of a model on some ranks, and the bytes of one rank.

    Attributes:
        kept_bytes: between forward and backward.
        total_bytes: those, one recomputed block, parameters, gradients, AdamW's state, and gathered
            parameters.
    """

    way: str
    blocks: int
    ranks: int
    kept_bytes: int
    total_bytes: int


class GPTLoss(GPT):
    """The demo's model, returning its loss as transformers models do."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Map (B, T) int64 twice to a scalar."""
        return F.cross_entropy(super().forward(tokens).flatten(0, 1), labels.flatten())


def example() -> tuple[nn.Module, dict[str, Any], str]:
    """Return a model that returns its loss, a batch as a dict, and the name of its blocks."""
    torch.manual_seed(0)
    config = Config()
    tokens = torch.randint(256, (config.batch, config.context))
    return GPTLoss(config), {"tokens": tokens, "labels": tokens}, "blocks"


def kept_of(model: nn.Module, batch: dict[str, Any]) -> int:
    """Return the bytes of a forward that are kept for backward; gradients are dropped."""
    count = kept_bytes(model, **batch)
    model.zero_grad()
    return count


def change(model: nn.Module, path: str, way: str, blocks: int, folder: str) -> None:
    """Apply a way to the first blocks; `PLAIN` does nothing."""
    if way != PLAIN:
        for block in list(model.get_submodule(path))[:blocks]:
            WAYS[way](block, folder)


def predict(model: nn.Module, batch: dict[str, Any], path: str, folder: str) -> Iterator[Choice]:
    """Yield every choice, cheapest first: fewest ranks, then least recomputation."""
    blocks = list(model.get_submodule(path))
    plain, counted = kept_of(model, batch), {}
    for way in WAYS:  # the first block stores the batch; the second shows what further blocks save
        few = [plain]
        for count in (1, 2):
            change(model, path, way, count, folder)
            few.append(kept_of(model, batch))
            unwrap(model)
        counted[way] = few
    again = max(few[1] - few[2] for few in counted.values())
    units = unit_shapes(model, units=type(blocks[0]))
    for ranks in RANKS:
        state = plan_training(units, world_size=ranks).total
        if ranks == 1:  # nothing to gather
            state = 4 * sum(p.nbytes for p in model.parameters())
        yield Choice(PLAIN, 0, ranks, plain, state + plain)
        for way, (_, first, second) in counted.items():
            for count in range(1, len(blocks) + 1):
                kept = first - (count - 1) * (first - second)
                yield Choice(way, count, ranks, kept, state + kept + again)


def recommend(choices: list[Choice], limit_bytes: int) -> Choice | None:
    """Return the first choice that fits."""
    return next((choice for choice in choices if choice.total_bytes <= limit_bytes), None)


def measure(
    model: nn.Module, batch: dict[str, Any], path: str, choices: list[Choice], steps: int
) -> list[dict[str, Any]]:
    """Return kept bytes, time relative to plain, and whether gradients are equal."""
    with tempfile.TemporaryDirectory() as folder:
        models = [copy.deepcopy(model) for _ in choices]
        for one, choice in zip(models, choices, strict=True):
            change(one, path, choice.way, choice.blocks, folder)
        kept = [kept_of(one, batch) for one in models]
        plain = copy.deepcopy(model)
        turns = [[timed(one, batch) for one in (plain, *models)] for _ in range(steps)]
        return [
            asdict(choice)
            | {"measured_kept_bytes": kept[place], "equal": gradients_equal(plain, models[place])}
            | {"time_ratio": spread([turn[place + 1] / turn[0] for turn in turns])}
            for place, choice in enumerate(choices)
        ]


def timed(model: nn.Module, batch: dict[str, Any]) -> float:
    """Return the seconds of one forward and backward."""
    model.zero_grad()
    torch.manual_seed(0)  # for dropout
    began = time.perf_counter()
    out = model(**batch)
    getattr(out, "loss", out).backward()
    return time.perf_counter() - began


def gradients_equal(one: nn.Module, other: nn.Module) -> bool:
    """Whether all gradients are bit-identical."""
    pairs: Iterator[tuple[Tensor, Tensor]] = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None)


def spread(ratios: list[float]) -> list[float]:
    """Return least, median and most."""
    return [min(ratios), statistics.median(ratios), max(ratios)]


def say(choice: dict[str, Any], of: int) -> str:
    """Describe a choice in a sentence."""
    way, blocks, ranks = choice["way"], choice["blocks"], choice["ranks"]
    where = "on one rank" if ranks == 1 else f"shard over {ranks} ranks"
    return f"blocks {way}, {where}" if way == PLAIN else f"{way}: {blocks} of {of} blocks, {where}"


def lines(result: dict[str, Any]) -> list[str]:
    """Return the printed lines of a result."""
    row, size = result["recommended"], sac_policies.budget.format_size
    low, middle, high = row["time_ratio"]
    equal = "equal, every bit" if row["equal"] else "DIFFER"
    said = [
        f"for {size(result['limit_bytes'])}: {say(row, result['blocks'])}",
        f"  predicted: {size(row['total_bytes'])} a rank, {size(row['kept_bytes'])} of it kept",
        f"  measured:  {size(row['measured_kept_bytes'])} kept, gradients {equal}",
        f"  time:      {middle:.2f} of a plain step ({low:.2f} to {high:.2f})",
    ]
    if row["ranks"] > 1:
        said.append("  shards:    predicted only: this is one process")
    return said


def main() -> int:
    """Print the recommendation and the measurements; return 1 if nothing fits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", default="80 MiB", help='bytes of one rank, such as "6 GiB"')
    parser.add_argument("--model", help="file.py:function, which gives model, batch, blocks' path")
    parser.add_argument("--steps", type=int, default=5, help="turns that are timed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    build = example
    if options.model:
        file, _, function = options.model.rpartition(":")
        build = runpy.run_path(file)[function]
    # A model without attention does not use the second entry of PRODUCTS.
    warnings.simplefilter("ignore", sac_policies.UnmatchedEntryWarning)
    model, batch, path = build()
    with tempfile.TemporaryDirectory() as folder:
        choices = list(predict(model, batch, path, folder))
    limit = sac_policies.budget.parse_size(options.limit)
    chosen, count = recommend(choices, limit), len(list(model.get_submodule(path)))
    if chosen is None:
        least = min(choices, key=lambda choice: choice.total_bytes)
        size = sac_policies.budget.format_size(least.total_bytes)
        print(f"nothing fits {options.limit}; least: {say(asdict(least), count)}: {size}")
        return 1
    tried = [c for c in choices if c.ranks == 1 and c.blocks in {0, count // 2, count}]
    rows = measure(model, batch, path, [chosen, *tried], options.steps)
    result = {
        "limit_bytes": limit,
        "blocks": count,
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "machine": f"{platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} threads",
        "date": f"{datetime.date.today()}",
        "recommended": rows[0],
        "measured": rows[1:],
    }
    print("\n".join(lines(result)))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
