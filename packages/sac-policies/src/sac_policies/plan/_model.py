"""Find the model to plan for: an importable function, or a transformers config."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._errors import BudgetError, shown
from .._torch_compat import no_fake_mode, tree_map_tensors
from ..budget._step import loss_of

Batch = tuple[int, int]
"""Sequences, and tokens of each."""
OPTIMIZERS = {
    # By name: bytes of state per byte of a parameter, and tensors read and written in a step.
    "none": (0.0, 0),
    "sgd": (0.0, 3),
    "sgd-momentum": (1.0, 5),
    "muon": (1.0, 5),
    "adam": (2.0, 7),
    "adamw": (2.0, 7),
}


@dataclass(frozen=True)
class Subject:
    """A model, a batch and a loss, all without data.

    Attributes:
        name: of the model, for reports.
        model: on fake tensors.
        batch: argument of a step.
        loss_of: runs a forward and returns its loss.
    """

    name: str
    model: nn.Module
    batch: Any
    loss_of: Callable[[], torch.Tensor]


def parse_tokens(text: str) -> Batch:
    """Read "32k", "4096" or "4x8k" as sequences, and tokens of each.

    Raises:
        BudgetError: the text has another form.

    Example:
        >>> parse_tokens("32k"), parse_tokens("4x2048")
        ((1, 32768), (4, 2048))
    """
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)(k?)", text.strip().lower())
    sequences, tokens = (int(match[1] or 1), int(match[2])) if match else (0, 0)
    if not match or sequences * tokens < 1:
        raise BudgetError(
            f"sac_policies plan: tokens {shown(text)} do not parse. Write the tokens of one "
            'sequence, such as "32k", or sequences and tokens of each, such as "4x8k".'
        )
    return sequences, tokens * (1024 if match[3] else 1)


def build(source: str, batch: Batch, dtype: torch.dtype) -> Subject:
    """Build a model and its batch; called under a fake mode.

    Args:
        source: "module:function" or "file.py:function", whose function returns a model and a
            batch, and a function for the loss if the model does not return one; or the name or the
            folder of a transformers config.
        batch: passed to the function as `batch` if it has that argument.
        dtype: of a transformers model.

    Raises:
        BudgetError: the source does not exist, or does not give a model and a batch.
    """
    try:
        made = _made(source, batch, dtype)
    except BudgetError:
        raise
    except Exception:  # some conversions of modules do not take fake tensors
        made = _made_on_meta(source, batch, dtype)
    if not (isinstance(made, Sequence) and len(made) in (2, 3) and isinstance(made[0], nn.Module)):
        raise BudgetError(
            f"sac_policies plan: {source!r} returned {shown(made)}. Return a tuple of an nn.Module "
            "and a batch, and a function from the output to a loss if the output has none."
        )
    model, given, *loss = made
    run = partial(loss_of, model.train(), given, *loss)
    return Subject(type(model).__name__, model, given, run)


def _made(source: str, batch: Batch, dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        module, colon, function = source.rpartition(":")
        return _called(module, function, batch) if colon else _of_config(source, batch)
    finally:
        torch.set_default_dtype(before)


def _made_on_meta(source: str, batch: Batch, dtype: torch.dtype) -> Any:
    """Build on the meta device, and replace all tensors by fake ones."""
    with no_fake_mode(), torch.device("meta"):
        made = _made(source, batch, dtype)
    known: dict[torch.Tensor, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in known:
            size, stride = tensor.size(), tensor.stride()
            empty = torch.empty_strided(size, stride, dtype=tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                known[tensor] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            else:
                known[tensor] = empty.requires_grad_(tensor.requires_grad)
        return known[tensor]

    model, *rest = made if isinstance(made, Sequence) else (made,)
    for module in model.modules() if isinstance(model, nn.Module) else ():
        places: list[Any] = [module._parameters, module._buffers, vars(module)]
        for held in places:
            for name, value in list(held.items()):
                if isinstance(value, torch.Tensor):
                    held[name] = fake(value)
    return (model, *tree_map_tensors(fake, rest))


def _called(where: str, name: str, batch: Batch) -> Any:
    try:
        if where.endswith(".py"):
            path = Path(where).resolve()
            sys.path.insert(0, str(path.parent))
            where = path.stem
        elif os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        function = getattr(importlib.import_module(where), name)
    except (ImportError, AttributeError) as error:
        raise BudgetError(
            f"sac_policies plan: {where}:{name} cannot be imported ({error}). Pass "
            "module:function, or the name of a transformers config."
        ) from error
    takes = inspect.signature(function).parameters
    return function(batch=batch) if "batch" in takes else function()


def _of_config(source: str, batch: Batch) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise BudgetError(
            f"sac_policies plan: {source!r} is read as a transformers config, but transformers is "
            "not installed. Install it, or pass module:function."
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise BudgetError(
            f"sac_policies plan: no config is found for {source!r} ({reason}). Pass a folder with "
            "a config.json, a name on the hub, or module:function."
        ) from error
    config.use_cache = False
    _register_attention(transformers)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=_ATTENTION)
    ids = torch.zeros(batch, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


_ATTENTION = "sac_policies_plan"


def _register_attention(transformers: Any) -> None:
    """Make transformers call sdpa without a mask, as on a device for batches without padding.

    With fake tensors it would create a full (tokens, tokens) mask, since it cannot read the
    padding.
    """
    sdpa = importlib.import_module("transformers.integrations.sdpa_attention")
    transformers.AttentionInterface.register(_ATTENTION, sdpa.sdpa_attention_forward)
    transformers.AttentionMaskInterface.register(_ATTENTION, lambda *args, **kwargs: None)
