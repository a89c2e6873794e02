"""Find blocks that other code recomputes, and say how to turn that off.

A step shows which: a module that is called inside of backward is recomputed, whoever does it. What
turns it off is told by attributes and classes that the well-known ways leave on modules.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .._frames import user_stacklevel
from .._torch_compat import backward_id
from .._torch_compat._module_calls import around_calls, is_compiled

_SWITCHES = {
    "gradient_checkpointing": (
        "activation_checkpointing_disable",  # transformers
        "gradient_checkpointing_disable",
        "disable_gradient_checkpointing",  # diffusers
    ),
    "grad_checkpointing": ("set_grad_checkpointing",),  # timm
}
"""Attributes that are true while a library's switch is on, and methods that turn it off."""
_CKPT_WRAPS = "_ckpt_wrap"
"""Attribute of modules that ckpt_wrap has changed."""


@contextmanager
def recomputed_in(model: nn.Module) -> Iterator[dict[nn.Module, None]]:
    """Yield the modules below a model that are called in backward while the context is open."""
    found: dict[nn.Module, None] = {}
    modules = list(_called_from_python(model))

    def begin(number: int, *_: Any) -> None:
        if backward_id() >= 0:
            found[modules[number]] = None

    with around_calls(modules, begin):
        yield found


def _called_from_python(module: nn.Module) -> Iterator[nn.Module]:
    if is_compiled(module) or isinstance(module, torch.jit.ScriptModule):
        return
    for child in module.children():
        yield child
        yield from _called_from_python(child)


def said_of(
    model: nn.Module, regions: Sequence[tuple[str, nn.Module]], recomputed: dict[nn.Module, None]
) -> str:
    """Say which regions are recomputed by other code, and how to turn it off; "" if none are.

    Args:
        model: the model.
        regions: its blocks, by path.
        recomputed: modules that were called in backward.
    """
    paths = [
        path for path, region in regions if any(each in recomputed for each in region.modules())
    ]
    if not recomputed:
        return ""
    if paths:
        where = f"{paths[0]} to {paths[-1]}" if len(paths) > 1 else paths[0] or "the model"
    else:
        where = type(next(iter(recomputed))).__name__
    who, remedy = _whose(model)
    return f"{where} {'are' if len(paths) > 1 else 'is'} recomputed by {who}: {remedy}"


def _whose(model: nn.Module) -> tuple[str, str]:
    """Return who recomputes modules of a model, and how to turn it off."""
    for module in model.modules():
        for flag, methods in _SWITCHES.items():
            if getattr(module, flag, False) is True:
                owner = next((each for each in methods if hasattr(model, each)), None)
                argument = "False" if flag == "grad_checkpointing" else ""
                call = f"call model.{owner}({argument})" if owner else f"set {flag} = False"
                return f"{flag}, which is on", f"to let fit_ choose, {call} before fit_"
    for module in model.modules():
        kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__}
        if any(kind.endswith("checkpoint_wrapper.CheckpointWrapper") for kind in kinds):
            how = "build the model without it, or FSDP with activation_checkpointing=False"
            return "torch's checkpoint_wrapper", f"to let fit_ choose, {how}"
        if vars(module).get(_CKPT_WRAPS) is not None:
            return "ckpt_wrap", "to let fit_ choose, call ckpt_wrap.unwrap(model) before fit_"
    return "code in a forward", "to let fit_ choose, take its calls of checkpoint out"


def is_recomputed_too(module: nn.Module) -> bool:
    """Whether other code recomputes a fitted module: its switch is on, or backward calls it."""
    attributes = vars(module)
    return bool(
        attributes.get("gradient_checkpointing")
        or attributes.get("grad_checkpointing")
        or backward_id() >= 0
    )


def warn_of_both(module: nn.Module) -> None:
    """Warn that a fitted module is recomputed by other code as well."""
    who, _ = _whose(module)
    warnings.warn(
        f"sac_policies.fit_: a fitted {type(module).__name__} is also recomputed by {who}, turned "
        "on after fit_. A step then takes other memory than planned, and more time. Turn it off "
        "(gradient_checkpointing=False in a trainer's arguments, "
        "model.gradient_checkpointing_disable(), ckpt_wrap.unwrap(model)), or call undo() on the "
        "result of fit_.",
        stacklevel=user_stacklevel(),
    )
