"""Compare selective checkpointing on 31 models of transformers, diffusers and timm.

Each outer block of a model from `tests/integration/` is one region. Five ways run interleaved in
one process, each on a model of its own: plain, torch's full checkpointing, torch's selective
checkpointing with matmuls, attention and convolutions saved, this package with the same operators
saved, and this package with nothing saved. Times are thread time over a plain step of the same
round. Kept bytes are what the allocator holds after a forward; a peak is the most that it holds
during a step, without parameters and inputs.

    python bench_models.py --json models.json
    python bench_models.py --model Mixtral --factor 4
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_region import keep_freed_memory
from frontier_fits import Region
from frontier_times import in_turn, over_the_first, seconds_of
from frontier_ways import COSTLY, FULL, torchs_selective, under
from torch import nn
from torch.profiler import ProfilerActivity, profile

import sac_policies

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests/integration"))

import _cases
import _parts
import pytest
from _models import Case, without_cache

WAYS: dict[str, Region | None] = {
    "plain": None,
    "full": FULL,
    "torch": torchs_selective(COSTLY),
    "matmuls": under(policy=COSTLY),
    "nothing": under(policy=sac_policies.recompute_all()),
}
WIDTHS = {
    *("hidden_size", "intermediate_size", "n_embd", "d_model", "d_kv", "d_ff", "ffn_dim"),
    *("encoder_ffn_dim", "decoder_ffn_dim", "word_embed_proj_dim", "embedding_size", "head_dim"),
    *("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *("moe_intermediate_size", "projection_dim", "embed_dim", "hidden_sizes"),
}
"""Settings of a configuration that `--factor` multiplies."""
WARM = 3


def widened(settings: dict[str, Any], factor: int) -> dict[str, Any]:
    """Multiply each width of a configuration, nested ones too."""

    def larger(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return widened(value, factor)
        if name not in WIDTHS:
            return value
        return [each * factor for each in value] if isinstance(value, list) else value * factor

    return {name: larger(name, value) for name, value in settings.items()}


def cases(options: argparse.Namespace) -> list[Case]:
    """Return the models whose libraries are installed, wider and with a larger batch."""
    make = _cases.of_transformers
    _cases.of_transformers = lambda model, **settings: make(  # type: ignore[assignment]
        model, **widened(settings, options.factor)
    )
    _parts.COPIES = options.copies
    found = []
    for case in _cases.CASES:
        if options.model and case.name not in options.model:
            continue
        try:
            assert importlib.util.find_spec(case.library), f"{case.library} is not installed"
            case.build()
        except (AssertionError, pytest.skip.Exception) as reason:
            print(f"{case.name}: {reason}")
            continue
        larger = _parts.enlarged(case)
        batch = larger.inputs()
        found.append(replace(larger, inputs=lambda batch=batch: batch))
    return found


def model_under(case: Case, region: Region | None) -> nn.Module:
    """Return a model whose outer blocks run in a region."""
    (model,) = without_cache(case.build())
    for block in case.outer_blocks_of(model).values() if region else ():
        block.forward = functools.partial(region, block.forward)
    return model


def step(case: Case, model: nn.Module) -> list[torch.Tensor | None]:
    """Run forward and backward, and return the gradient of each parameter."""
    case.loss(model).backward()
    return [parameter.grad for parameter in model.parameters()]


def are_equal(found: list[torch.Tensor | None], plain: list[torch.Tensor | None]) -> bool:
    """True if all gradients have the same bits."""
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(found, plain, strict=True)
    )


def kept_and_peak(function: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that the allocator holds after a call, and the most during it."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        result = function()
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del result
    return held, peak


def row_of(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one model under each way."""
    row: dict[str, Any] = {"model": case.name, "differs": [], "kept": {}, "peak": {}}
    models, plain = {}, step(case, model_under(case, None))
    for way, region in WAYS.items():
        model = model_under(case, region)
        try:
            for _ in range(WARM):
                model.zero_grad()
                found = step(case, model)
        except RuntimeError as error:
            row[f"{way}_raises"] = f"{error}".partition("\n")[0]
            continue
        models[way] = model
        if not are_equal(found, plain):
            row["differs"].append(way)
        del found
        model.zero_grad()
        row["kept"][way] = kept_and_peak(lambda model=model: case.loss(model))[0]
        row["peak"][way] = kept_and_peak(lambda model=model: case.loss(model).backward())[1]

    def seconds(model: nn.Module) -> float:
        model.zero_grad()
        return seconds_of(lambda: case.loss(model).backward())

    spent = in_turn([functools.partial(seconds, m) for m in models.values()], options.rounds)
    times = dict(zip(models, spent, strict=True))
    row["plain_ms"] = round(1000 * statistics.median(times["plain"]), 2)
    row["time"] = dict(zip(models, over_the_first(spent), strict=True))
    row["nothing kept, peak over full"] = row["peak"]["nothing"] / row["peak"]["full"]
    row["nothing kept, step over full"] = ratio(times["nothing"], times["full"])
    if "torch" in times:
        row["kept over torch's selective"] = row["kept"]["matmuls"] / row["kept"]["torch"]
        row["step over torch's selective"] = ratio(times["matmuls"], times["torch"])
    return row


def ratio(times: list[float], others: list[float]) -> float:
    """Return the median of ratios within a round."""
    return round(statistics.median(a / b for a, b in zip(times, others, strict=True)), 3)


def main() -> None:
    """Measure the models, print a row each and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", action="append", help="only this one, by its name")
    parser.add_argument("--factor", type=int, default=8, help="of the widths, 32 by default")
    parser.add_argument("--copies", type=int, default=16, help="of each model's batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = []
    for case in cases(options):
        rows.append(row_of(case, options))
        print(json.dumps(rows[-1]), flush=True)
    names = {name: None for row in rows for name in row if " " in name}
    medians = {
        name: round(statistics.median(row[name] for row in rows if name in row), 3)
        for name in names
    }
    differ = {row["model"]: row["differs"] for row in rows if row["differs"]}
    print(json.dumps({"models": len(rows), "medians": medians, "differ": differ}, indent=1))
    if options.json is not None:
        result = {"torch": torch.__version__, **vars(options), "json": None, "models": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
