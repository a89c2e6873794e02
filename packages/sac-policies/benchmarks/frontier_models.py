"""Other people's models under each way: bytes that are kept, budgets, gradients and times."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from frontier_fits import Region
from frontier_times import in_turn, over_the_first, seconds_of
from frontier_ways import COSTLY, FULL, kept_bytes, torchs_selective, under
from torch import nn

import sac_policies

SOLVED, WARM, SHARES = "50%", 3, (1.0, 0.75, 0.5, 0.25, 0.0)
REGIONS: dict[str, Region | None] = {
    "none": None,
    "full": FULL,
    "nothing": under(policy=sac_policies.recompute_all()),
    "selective": torchs_selective(COSTLY),
    "products": under(policy=COSTLY),
}
"""What runs each block of a model, by way."""


def made(case: Any, region: Region | None = None) -> nn.Module:
    """A model of its own, its outer blocks under a region if one is given."""
    from _models import without_cache

    (model,) = without_cache(case.build())
    for block in case.outer_blocks_of(model).values() if region else ():
        block.forward = functools.partial(region, block.forward)
    return model


def gradients(case: Any, model: nn.Module) -> list[torch.Tensor | None]:
    """Those of one step, by parameter."""
    model.zero_grad()
    case.loss(model).backward()
    return [parameter.grad for parameter in model.parameters()]


def are_same(found: list[torch.Tensor | None], plain: list[torch.Tensor | None]) -> bool:
    """Whether gradients are those of a plain model, to the last bit."""
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(found, plain, strict=True)
    )


def model_row(case: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Kept bytes of one model by way, and what budgets can be had."""
    row: dict[str, Any] = {"model": case.name, "bytes": {}, "bitwise": {}}
    plain = gradients(case, made(case))
    for way, region in REGIONS.items():
        model = made(case, region)
        try:
            gradients(case, model)
            same = are_same(gradients(case, model), plain)
            model.zero_grad()
            row["bytes"][way] = kept_bytes(lambda: case.loss(model), torch.device("cpu"))  # noqa: B023
            row["bitwise"][way] = same
        except RuntimeError as error:
            row["bytes"][way] = None
            row[f"{way} raises"] = f"{error}".partition("\n")[0]
    sizes = row["bytes"]
    row["freed"] = round((sizes["none"] - sizes["nothing"]) / (sizes["none"] - sizes["full"]), 4)
    row["budgets"] = {asked: fitted(case, made(case), asked) for asked in options.budgets}
    row["foretold"] = foretold(case)
    row["full peak"] = round(peak(case, made(case, FULL)) / peak(case, made(case)), 3)
    return row


def peak(case: Any, model: nn.Module) -> int:
    """Bytes that a step of a model takes at most."""
    found = sac_policies.fit_(model, case.inputs(), "100%")
    return int(found.plain_bytes)


def foretold(case: Any) -> dict[str, Any]:
    """How far `profile_step` is off, in percent: without checkpointing, and at most under plans.

    Each plan is for the model as one region.
    """
    step = sac_policies.profile_step(made(case), case.inputs())
    low, high = step.trace.fixed_bytes(), step.trace.total_bytes()
    offs = []
    for share in SHARES:
        plan = sac_policies.solve(step.trace, low + int(share * (high - low)))
        model = made(case)
        model.forward = functools.partial(under(policy=plan), model.forward)
        offs.append(_off(step.peak_bytes(plan), peak(case, model)))
    plain = _off(step.peak_bytes(), peak(case, made(case)))
    return {"plain": plain, "plans": len(offs), "worst": max(offs, key=abs)}


def _off(predicted: int, measured: int) -> float:
    return round(100 * (predicted / measured - 1), 2)


def fitted(case: Any, model: nn.Module, asked: str) -> dict[str, Any]:
    """What `fit_` finds for a budget; how far its prediction is off, in percent."""
    found = sac_policies.fit_(model, case.inputs(), asked)
    if not found:
        return {"fits": False, "least": found.smallest_bytes, "budget": found.budget_bytes}
    share = found.peak_bytes / found.plain_bytes
    told = {
        "fits": True,
        "share": round(share, 3),
        "steps": len(found.rounds),
        "off": _off(found.predicted_bytes, found.peak_bytes),
    }
    found.undo()
    return told


def solved(case: Any, model: nn.Module, asked: str) -> bool:
    """Run each outer block by a plan of its own, if each has one for that share of its bytes."""
    from _models import calls_of

    plans = []
    for block, args, kwargs in calls_of(case, model).values():
        plan = sac_policies.solve(sac_policies.profile(block, *args, repeats=5, **kwargs), asked)
        if not plan:
            return False
        plans.append((block, plan))
    for block, plan in plans:
        block.forward = functools.partial(under(policy=plan), block.forward)
    return True


def changed(case: Any, budgets: Iterable[str]) -> Iterator[tuple[str, nn.Module | None]]:
    """Yield each way and a model that keeps to it; None where a budget cannot be had."""
    for way, region in REGIONS.items():
        yield way, made(case, region)
    for asked in budgets:
        model = made(case)
        found = sac_policies.fit_(model, case.inputs(), asked)
        yield f"fit_ {asked}", model if found else None
    model = made(case)
    yield f"solve {SOLVED}", model if solved(case, model, SOLVED) else None


def times_of(case: Any, options: argparse.Namespace) -> dict[str, Any]:
    """A step's time by way, over a plain one's; None where a way raises or a budget is too small.

    Each way has a model of its own, which has done three steps before: the first one of a region
    is watched and the second written down.
    """
    batch = case.inputs()
    case = replace(case, inputs=lambda: batch)
    told: dict[str, Any] = {"times": {}, "bitwise": {}}
    models, plain = {}, gradients(case, made(case))
    for way, model in changed(case, options.budgets):
        told["times"][way] = None
        if model is None:
            continue
        try:
            for _ in range(WARM):
                found = gradients(case, model)
        except RuntimeError as error:
            told[f"{way} raises"] = f"{error}".partition("\n")[0]
            continue
        models[way], told["bitwise"][way] = model, are_same(found, plain)

    def seconds(model: nn.Module) -> float:
        model.zero_grad()
        return seconds_of(lambda: case.loss(model).backward())

    clocked = [functools.partial(seconds, model) for model in models.values()]
    spent = in_turn(clocked, options.rounds, options.seconds)
    told["times"] |= dict(zip(models, over_the_first(spent), strict=True))
    plain_ms = 1000 * statistics.median(spent[0])
    return {**told, "plain ms": round(plain_ms, 2), "rounds": len(spent[0])}


def joined(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Runs side by side: times as ranges, what is not in each of them as None."""
    for row, *others in zip(*runs, strict=True):
        for way in row["times"]:
            several = [each["times"][way] for each in (row, *others)]
            row["times"][way] = None if None in several else [min(several), max(several)]
            if way in row["bitwise"]:
                row["bitwise"][way] &= all(each["bitwise"].get(way, True) for each in others)
        row["plain ms"] = [round(f([r["plain ms"] for r in (row, *others)]), 2) for f in (min, max)]
        row["rounds"] += sum(each["rounds"] for each in others)
    return runs[0]


def one_run(cases: list[Any], options: argparse.Namespace, is_first: bool) -> list[dict[str, Any]]:
    """A row for each model that can be made here; bytes and budgets in the first run only."""
    rows = []
    for case in cases:
        row = model_row(case, options) if is_first else {"model": case.name}
        timed = times_of(case, options)
        row = {**row, **timed, "bitwise": {**row.get("bitwise", {}), **timed["bitwise"]}}
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def models(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each model of `tests/integration/` that can be made here."""
    root = Path(__file__).resolve().parents[3] / "tests/integration"
    sys.path.insert(0, str(root))
    import _parts
    import pytest
    from _cases import CASES

    _parts.COPIES = options.copies
    cases = []
    for case in CASES:
        if options.model and case.name not in options.model:
            continue
        if importlib.util.find_spec(case.library) is None:
            print(f"{case.name}: {case.library} is not installed")
            continue
        try:
            case.build()
        except pytest.skip.Exception as reason:
            print(f"{case.name}: {reason}")
            continue
        cases.append(_parts.enlarged(case))
    return joined([one_run(cases, options, number == 0) for number in range(options.runs)])
