"""The adapter of transformers' gradient checkpointing, which a layer gets from its class.

A layer derives from `GradientCheckpointingLayer`, and its model enables checkpointing for all
layers. So the adapter gives a module a class derived from its own and that one, in a model of this
one layer, and calls `activation_checkpointing_enable`. There is no wrapper module, and no way to
select parts of a model.
"""

from __future__ import annotations

import types
from importlib import import_module
from importlib.metadata import version
from typing import Any

from torch import nn

from torchparts_conformance import Implementation
from torchparts_conformance.adapters import inside_torch

_models: Any = import_module("transformers.modeling_utils")
_layers: Any = import_module("transformers.modeling_layers")
_Impl = inside_torch.CheckpointImpl
_NO_WRAPPER = "a layer checkpoints by its class; there is no wrapper module"
_PASSED_ON = "options go to torch's checkpoint, which is judged with torch"
_OF_WRAPPERS = (
    *("CW-001", "CW-002", "CW-008", "CW-009", "CW-010"),
    *("CW-019", "CW-020", "CW-021", "CW-022", "CW-053"),
)


class _Model(_models.PreTrainedModel):
    """A model of one layer, whose input is not a token id."""

    supports_gradient_checkpointing = True
    main_input_name = "x"
    config_class = import_module("transformers").PretrainedConfig

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(self.config_class())
        self.layer = layer


def _checkpoint_wrapper(module: nn.Module, checkpoint_impl: Any = _Impl.NO_REENTRANT) -> nn.Module:
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind, _layers.GradientCheckpointingLayer), {})
    reenters = checkpoint_impl is _Impl.REENTRANT
    _Model(module).activation_checkpointing_enable({"use_reentrant": reenters})
    return module


def implementation() -> Implementation:
    """Adapt the installed transformers."""
    part = types.SimpleNamespace(checkpoint_wrapper=_checkpoint_wrapper, CheckpointImpl=_Impl)
    return Implementation(
        name="transformers",
        version=version("transformers"),
        distributions=("transformers",),
        parts={"ckpt-wrap": part},
        lacks={
            "ckpt-wrap": {
                **dict.fromkeys(_OF_WRAPPERS, _NO_WRAPPER),
                **dict.fromkeys(("context_fn", "checkpoint_fn"), _PASSED_ON),
            }
        },
    )
