"""Other people's models under each way: bytes that are kept, budgets, gradients."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from frontier_fits import Region
from frontier_ways import COSTLY, FULL, kept_bytes, torchs_selective, under
from torch import nn

import sac_policies


def model_row(case: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Kept bytes of one model by way, and what budgets can be had."""
    from _models import without_cache

    def made(region: Region | None) -> nn.Module:
        (model,) = without_cache(case.build())
        for block in case.outer_blocks_of(model).values() if region else ():
            block.forward = functools.partial(region, block.forward)
        return model

    def gradients(model: nn.Module) -> list[torch.Tensor | None]:
        model.zero_grad()
        case.loss(model).backward()
        return [parameter.grad for parameter in model.parameters()]

    regions: dict[str, Region | None] = {
        "none": None,
        "full": FULL,
        "nothing": under(policy=sac_policies.recompute_all(), engine="recipe"),
        "selective": torchs_selective(COSTLY),
        "products": under(policy=COSTLY, engine="recipe"),
    }
    row: dict[str, Any] = {"model": case.name, "bytes": {}, "bitwise": {}}
    plain = gradients(made(None))
    for way, region in regions.items():
        model = made(region)
        try:
            gradients(model)
            same = all(
                (a is None and b is None) or torch.equal(a, b)
                for a, b in zip(gradients(model), plain, strict=True)
            )
            model.zero_grad()
            row["bytes"][way] = kept_bytes(lambda: case.loss(model), torch.device("cpu"))  # noqa: B023
            row["bitwise"][way] = same
        except RuntimeError as error:
            row["bytes"][way] = None
            row[f"{way} raises"] = f"{error}".partition("\n")[0]
    sizes = row["bytes"]
    row["freed"] = round((sizes["none"] - sizes["nothing"]) / (sizes["none"] - sizes["full"]), 4)
    row["budgets"] = {asked: fitted(case, made(None), asked) for asked in options.budgets}
    row["full peak"] = round(peak(case, made(regions["full"])) / peak(case, made(None)), 3)
    return row


def peak(case: Any, model: nn.Module) -> int:
    """Bytes that a step of a model takes at most."""
    found = sac_policies.fit_(model, case.inputs(), "100%")
    return int(found.plain_bytes)


def fitted(case: Any, model: nn.Module, asked: str) -> dict[str, Any]:
    """What `fit_` finds for a budget; how far its prediction is off, in percent."""
    found = sac_policies.fit_(model, case.inputs(), asked)
    if not found:
        return {"fits": False, "least": found.smallest_bytes, "budget": found.budget_bytes}
    share = found.peak_bytes / found.plain_bytes
    off = 100 * (found.predicted_bytes / found.peak_bytes - 1)
    told = {
        "fits": True,
        "share": round(share, 3),
        "steps": len(found.rounds),
        "off": round(off, 2),
    }
    found.undo()
    return told


def models(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each model of `downstream/` that can be made here."""
    root = Path(__file__).resolve().parents[3] / "downstream"
    sys.path[:0] = [str(root), str(root / "models")]
    import _parts
    import pytest
    from _cases import CASES

    _parts.COPIES = options.copies
    rows = []
    for case in CASES:
        if options.model and case.name not in options.model:
            continue
        if importlib.util.find_spec(case.library) is None:
            print(f"{case.name}: {case.library} is not installed")
            continue
        try:
            rows.append(model_row(_parts.enlarged(case), options))
        except pytest.skip.Exception as reason:
            print(f"{case.name}: {reason}")
            continue
        print(json.dumps(rows[-1]), flush=True)
    return rows
