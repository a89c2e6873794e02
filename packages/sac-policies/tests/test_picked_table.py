"""Replays through edges of what reads many values into fewer, or picks some, give torch's bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from sac_policies.engines.recipe.tables._replay_table import RULES

from ._recipe import is_same, leaf, through_edges

X = leaf(3, 4, 5)
TIES = torch.tensor([[2.0, 1.0, 2.0], [0.0, 0.0, 0.0]]).requires_grad_()
AT = torch.tensor([1, -1, 0])
IMAGES = leaf(1, 2, 5, 3)

CASES: dict[str, Callable[[], torch.Tensor]] = {
    "mean": lambda: X.mean(),
    "mean of a matrix": lambda: X.mean((0, -1)),
    "mean that keeps dimensions": lambda: X.mean(1, keepdim=True),
    "mean in 64 bits": lambda: X.mean(0, dtype=torch.float64),
    "mean of all in 64 bits": lambda: X.mean(dtype=torch.float64),
    "sum": lambda: X.sum(),
    "sum of a matrix": lambda: X.sum((-1, 1), keepdim=True),
    "sum over no dimension": lambda: X.sum(()),
    "sum in 64 bits": lambda: X.sum(-1, dtype=torch.float64),
    "sum of all in 64 bits": lambda: X.sum(dtype=torch.float64),
    "cumulative": lambda: X.cumsum(-2),
    "cumulative in 64 bits": lambda: X.cumsum(0, dtype=torch.float64),
    "largest three": lambda: X.topk(3, -2)[0],
    "smallest two": lambda: X.topk(2, 0, largest=False)[0],
    "sorted down": lambda: X.sort(0, descending=True)[0],
    "maximum": lambda: X.max(1)[0],
    "maximum that keeps dimensions": lambda: X.max(-1, keepdim=True)[0],
    "maximum of ties": lambda: TIES.max(-1)[0],
    "maximum of one value": lambda: leaf().max(0)[0],
    "rows": lambda: X[AT],
    "columns": lambda: X[:, :, AT],
    "points": lambda: X[AT, :, AT],
    "where it is true": lambda: X[X.detach() > 0],
    "selected": lambda: X.index_select(-1, torch.tensor([4, 0, 0])),
    "scattered": lambda: X.scatter(-2, torch.tensor([[[3, 0], [1, 1]]]), leaf(1, 2, 2)),
    "shuffled": lambda: F.pixel_shuffle(leaf(1, 8, 3, 2), 2),
    "bicubic": lambda: F.interpolate(IMAGES, scale_factor=1.7, mode="bicubic"),
    "bicubic with corners": lambda: F.interpolate(
        IMAGES, size=(7, 2), mode="bicubic", align_corners=True
    ),
    "nearest": lambda: F.interpolate(IMAGES, scale_factor=1.7),
    "nearest, stretched": lambda: F.interpolate(IMAGES, scale_factor=(1.3, 2.7)),
    "nearest of a size": lambda: F.interpolate(IMAGES, size=(2, 7)),
    "bilinear": lambda: F.interpolate(IMAGES, scale_factor=1.7, mode="bilinear"),
    "bilinear, stretched": lambda: F.interpolate(IMAGES, scale_factor=(1.3, 2.7), mode="bilinear"),
    "bilinear with corners": lambda: F.interpolate(
        IMAGES, size=(7, 2), mode="bilinear", align_corners=True
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_operator_runs_again_on_what_its_edge_leads_to(name: str) -> None:
    """With the arguments that its node knows, negative ones among them."""
    made = CASES[name]()
    assert is_same(through_edges(CASES[name]), made.detach())


@pytest.mark.parametrize(("device", "fits"), [("cpu", True), ("meta", False)])
def test_scattering_runs_again_on_the_cpu_only(device: str, fits: bool) -> None:
    """Elsewhere what comes last to a place may be another in each call."""
    x = torch.ones(4, device=device, requires_grad=True)
    made = x.scatter(0, torch.zeros(4, dtype=torch.int64, device=device), x.cos())
    assert (RULES["ScatterBackward0"].unfit(made.grad_fn) == "") is fits


@pytest.mark.parametrize(("device", "fits"), [("cpu", True), ("meta", False)])
def test_running_sums_run_again_on_the_cpu_only(device: str, fits: bool) -> None:
    """Elsewhere the order of their sums may be another in each call."""
    made = torch.ones(4, device=device, requires_grad=True).cumsum(0)
    assert (RULES["CumsumBackward0"].unfit(made.grad_fn) == "") is fits
