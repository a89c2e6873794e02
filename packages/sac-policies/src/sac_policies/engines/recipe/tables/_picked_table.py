"""Replay rules through edges for what reads many values into fewer, or picks some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .._replay import Node, Operand, Rule, output_facts
from .._views import signed, signed_all
from ._probes import IMAGES, ROWS, Make, matrix, of_one

aten = torch.ops.aten


def _reduced(op: Any) -> Callable[[Node, torch.Tensor], torch.Tensor]:
    def through(node: Node, x: torch.Tensor) -> torch.Tensor:
        dtype = output_facts(node).dtype
        dims = signed_all(node._saved_dim)
        given: torch.Tensor = op(x, dims, node._saved_keepdim, dtype=dtype)
        return given

    return through


def _reduced_to_one(op: Any) -> Callable[[Node, torch.Tensor], torch.Tensor]:
    return lambda n, x: op(x, dtype=output_facts(n).dtype)


def _chosen(node: Node, x: torch.Tensor) -> torch.Tensor:
    """Take what the largest, or the k largest, were from where they were."""
    return x.gather(signed(node._saved_dim), node._saved_indices)


def _largest(node: Node, x: torch.Tensor) -> torch.Tensor:
    dim, indices = signed(node._saved_dim), node._saved_indices
    if x.dim() and not node._saved_keepdim:
        return x.gather(dim, indices.unsqueeze(dim)).squeeze(dim)
    return x.gather(dim, indices)


def _elsewhere(reason: str) -> Callable[[Node], str]:
    return lambda n: "" if output_facts(n).device.type == "cpu" else reason


def _at(make: Make) -> torch.Tensor:
    return torch.arange(ROWS, device=make(1).device).flip(0)


def _stretched(op: Any, *names: str) -> Callable[[Node, torch.Tensor], torch.Tensor]:
    return lambda n, x: op(x, *(getattr(n, f"_saved_{name}") for name in names))


PICKED_RULES = (
    # Reductions.
    of_one(
        "MeanBackward1",
        aten.mean.dim,
        _reduced(torch.mean),
        lambda make: matrix(make).mean(-1, keepdim=True),
        lambda make: matrix(make).mean(0),
    ),
    of_one(
        "MeanBackward0",
        aten.mean.default,
        _reduced_to_one(torch.mean),
        lambda make: matrix(make).mean(),
    ),
    of_one(
        "SumBackward1",
        aten.sum.dim_IntList,
        _reduced(torch.sum),
        lambda make: matrix(make).sum(-1, keepdim=True),
        lambda make: matrix(make).sum(0),
    ),
    of_one(
        "SumBackward0",
        aten.sum.default,
        _reduced_to_one(torch.sum),
        lambda make: matrix(make).sum(),
    ),
    of_one(
        "CumsumBackward0",
        aten.cumsum.default,
        lambda n, x: x.cumsum(signed(n._saved_dim), dtype=output_facts(n).dtype),
        lambda make: matrix(make).cumsum(-1),
        unfit=_elsewhere("may add up in another order in each call"),
    ),
    of_one(
        "TopkBackward0",
        aten.topk.default,
        _chosen,
        lambda make: matrix(make).topk(3)[0],
    ),
    of_one("SortBackward0", aten.sort.default, _chosen, lambda make: matrix(make).sort(-1)[0]),
    of_one(
        "MaxBackward0",
        aten.max.dim,
        _largest,
        lambda make: matrix(make).max(-1)[0],
        lambda make: matrix(make).max(0, keepdim=True)[0],
    ),
    # Indexing.
    of_one(
        "IndexBackward0",
        aten.index.Tensor,
        lambda n, x: aten.index(x, list(n._saved_indices)),
        lambda make: matrix(make)[_at(make)],
        lambda make: matrix(make)[:, _at(make)],
    ),
    of_one(
        "GatherBackward0",
        aten.gather.default,
        lambda n, x: x.gather(signed(n._saved_dim), n._saved_index),
        lambda make: matrix(make).gather(0, _at(make)[:, None].expand(ROWS, 3)),
    ),
    of_one(
        "IndexSelectBackward0",
        aten.index_select.default,
        lambda n, x: x.index_select(signed(n._saved_dim), n._saved_index),
        lambda make: matrix(make).index_select(-1, _at(make)),
    ),
    Rule(
        "ScatterBackward0",
        aten.scatter.src,
        None,
        through=lambda n, x, src: x.scatter(signed(n._saved_dim), n._saved_index, src),
        operands=(Operand(0), Operand(1)),
        edge_probes=(
            lambda make: matrix(make).scatter(0, _at(make)[:, None].expand(ROWS, 3), make(ROWS, 3)),
        ),
        unfit=_elsewhere("may write last to one place what another call does not"),
    ),
    # Windows.
    of_one(
        "PixelShuffleBackward0",
        aten.pixel_shuffle.default,
        _stretched(aten.pixel_shuffle, "upscale_factor"),
        lambda make: F.pixel_shuffle(make(2, 8, 3, 5), 2),
    ),
    of_one(
        "UpsampleBicubic2DBackward0",
        aten.upsample_bicubic2d.default,
        _stretched(aten.upsample_bicubic2d, "output_size", "align_corners", "scales_h", "scales_w"),
        lambda make: F.interpolate(make(*IMAGES), scale_factor=2, mode="bicubic"),
        lambda make: F.interpolate(make(*IMAGES), size=(5, 7), mode="bicubic"),
    ),
    of_one(
        "UpsampleNearest2DBackward0",
        aten.upsample_nearest2d.default,
        _stretched(aten.upsample_nearest2d, "output_size", "scales_h", "scales_w"),
        lambda make: F.interpolate(make(*IMAGES), scale_factor=2),
        lambda make: F.interpolate(make(*IMAGES), size=(5, 7)),
    ),
    of_one(
        "UpsampleBilinear2DBackward0",
        aten.upsample_bilinear2d.default,
        _stretched(
            aten.upsample_bilinear2d, "output_size", "align_corners", "scales_h", "scales_w"
        ),
        lambda make: F.interpolate(make(*IMAGES), scale_factor=2, mode="bilinear"),
        lambda make: F.interpolate(make(*IMAGES), size=(5, 7), mode="bilinear"),
    ),
)
