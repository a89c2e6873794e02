"""Ranks that were given different models find out before anything is sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchparts_conformance import requirement


def _layers(change: str) -> nn.Module:
    """Three parameters, one of them changed."""
    tensors = {"first": torch.zeros(4, 3), "second": torch.zeros(5), "third": torch.zeros(6)}
    if change == "shape":
        tensors["second"] = torch.zeros(7)
    elif change == "dtype":
        tensors["second"] = tensors["second"].double()
    elif change == "missing":
        del tensors["second"]
    elif change == "order":
        tensors["second"] = tensors.pop("second")
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor))
    return module


def _different(part: Any, rank: int, world_size: int) -> list[Any]:
    found = []
    for change in ("shape", "dtype", "missing", "order"):
        module = _layers(change if rank else "")
        kind, shapes = type(module), [param.shape for param in module.parameters()]
        try:
            part.fully_shard(module)
            text = ""
        except (RuntimeError, ValueError) as error:
            text = str(error)
        same = [param.shape for param in module.parameters()] == shapes
        found.append([change, text, same and type(module) is kind])
    return found


@requirement(
    "FP-113",
    level="MUST",
    text=(
        "Ranks that shard different models MUST all raise an error that names the first "
        "parameter that differs, and leave their modules as they were."
    ),
    rationale=(
        "with FSDP1 and FSDP2 the ranks go on into collectives of different sizes, which hang "
        "or give garbage"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_another_model_is_named_on_every_rank(part, ranks):
    """The first parameter that differs is named everywhere, and nothing was sharded."""
    for results in ranks(2, _different):
        for change, text, unchanged in results:
            assert "'second'" in text, (change, text)
            assert unchanged, change
