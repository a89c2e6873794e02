"""The adapter of fairscale, whose `checkpoint_wrapper` and flat parameters are older than torch's.

ckpt-wrap: one wrapper, with the single option `offload_to_cpu`. fairscale cannot apply it to a
model, and has no offload wrapper and no second implementation. flat-param: `FlattenParamsWrapper`,
which puts the parameters of a module into one `FlatParameter`; its FSDP, which shards, is not
adapted. Cases call the module and not the wrapper, so a hook does the first step of the wrapper's
forward: it makes the module's parameters views again.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import version
from typing import Any

from torch import nn

from torchparts_conformance import Implementation


class _Handle:
    """The holder of a module's `FlatParameter`, with the arguments of torch's handle."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        module: nn.Module,
        *unused: Any,
        **options: Any,
    ) -> None:
        wrapped = import_module("fairscale.nn.misc").FlattenParamsWrapper(module, list(params))
        module.register_forward_pre_hook(lambda *_: wrapped._unflatten_params_as_views())
        self._wrapped = wrapped

    @property
    def flat_param(self) -> Any:
        """The flat parameter."""
        return self._wrapped.flat_param


class _Flat:
    """Handles and their flat parameter type; everything else is not provided."""

    FlatParamHandle = _Handle
    HandleShardingStrategy = types.SimpleNamespace(FULL_SHARD="")  # read by cases, without effect

    @property
    def FlatParameter(self) -> Any:
        """The type of fairscale's flat parameters."""
        return import_module("fairscale.nn.misc.flatten_params_wrapper").FlatParameter


def implementation() -> Implementation:
    """Adapt the installed fairscale."""
    return Implementation(
        name="fairscale",
        version=version("fairscale"),
        distributions=("fairscale",),
        parts={
            "ckpt-wrap": "fairscale.nn.checkpoint",
            "flat-param": _Flat(),
        },
        lacks={
            "ckpt-wrap": {"CW-022": "its state dict keys have no prefix"},
            "flat-param": {
                **dict.fromkeys(("FP-010", "FP-011"), "fairscale keeps no original parameters"),
                **dict.fromkeys(("FP-012", "FP-014", "FP-019"), "its handle does not shard"),
                "FP-004": "it wraps a module that has parameters",
            },
        },
    )
