"""The adapter of fairscale, whose `checkpoint_wrapper` and flat parameters came before torch's.

Of ckpt-wrap it has one wrapper, and no options but `offload_to_cpu`: nothing to apply it to a
model, no offload wrapper, one implementation. Of flat-param it has `FlattenParamsWrapper`, which
puts the parameters of a module into one `FlatParameter`; what shards that is its FSDP, which is
not mapped. The cases call the module and not the wrapper, so a hook does what the wrapper's forward
does before: show the module's parameters anew.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import version
from typing import Any

from torch import nn

from torchparts_conformance import Implementation, NotProvided


class _Handle:
    """What holds a module's `FlatParameter`; it takes what a handle of torch's takes."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        module: nn.Module,
        *unused: Any,
        use_orig_params: bool = False,
        **options: Any,
    ) -> None:
        if use_orig_params:
            raise NotProvided("fairscale keeps no original parameters")
        wrapped = import_module("fairscale.nn.misc").FlattenParamsWrapper(module, list(params))
        module.register_forward_pre_hook(lambda *_: wrapped._unflatten_params_as_views())
        self._wrapped = wrapped

    @property
    def flat_param(self) -> Any:
        """The one there is."""
        return self._wrapped.flat_param

    def __getattr__(self, name: str) -> Any:
        raise NotProvided(f"fairscale's flat parameters have no {name}")


class _Flat:
    """Handles, and the type of what they hold; anything else is not provided."""

    FlatParamHandle = _Handle
    HandleShardingStrategy = types.SimpleNamespace(FULL_SHARD="")  # asked for, and then unused

    @property
    def FlatParameter(self) -> Any:
        """The type that fairscale's vectors have."""
        return import_module("fairscale.nn.misc.flatten_params_wrapper").FlatParameter

    def __getattr__(self, name: str) -> Any:
        raise NotProvided(f"fairscale's flat parameters have no {name}")


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
            "ckpt-wrap": {"CW-022": "keys of its states carry no prefix"},
        },
    )
