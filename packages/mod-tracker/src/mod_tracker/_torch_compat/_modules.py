"""Modules: how torch calls them, what they hold, and which of them the compiler made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def children_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """Return direct children by attribute name, shared ones under every name they have.

    `named_children` leaves out repeats, and a module may override it.
    """
    own = module.__dict__.get("_modules")
    return own if type(own) is dict or isinstance(own, Mapping) else _listed(module.named_children)


def parameters_of(module: nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Return the parameters that the module itself registers, by attribute name."""
    own = module.__dict__.get("_parameters")
    return own if isinstance(own, Mapping) else _listed(module.named_parameters, recurse=False)


def buffers_of(module: nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Return the buffers that the module itself registers, by attribute name."""
    own = module.__dict__.get("_buffers")
    return own if isinstance(own, Mapping) else _listed(module.named_buffers, recurse=False)


def _listed(listing: Callable[..., Any], **options: Any) -> dict[str, Any]:
    try:
        return dict(listing(**options))
    except AttributeError:
        # `nn.Module.__init__` has not run; calling the module will say so.
        return {}


def wrapped_by_compile(module: nn.Module) -> nn.Module | None:
    """Return the user's module behind the object `torch.compile(module)` returns, else None."""
    if type(module).__name__ != "OptimizedModule":
        return None
    return children_of(module).get("_orig_mod")


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's module: itself, or the one inside what torch.compile returned."""
    # Asked of every module several times: the common answer takes no second function.
    if type(module).__name__ != "OptimizedModule":
        return module
    inner = wrapped_by_compile(module)
    return module if inner is None else inner


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module, or of what `torch.compile` returned for it, run compiled."""
    in_place = module.__dict__.get("_compiled_call_impl")
    return in_place is not None or wrapped_by_compile(module) is not None


def is_compiled_graph(module: nn.Module) -> bool:
    """Whether the module is a graph that torch.compile made, not one the user wrote or traced."""
    if not isinstance(module, torch.fx.GraphModule):
        return False
    if "dynamo_compile_id" in getattr(module, "meta", ()) or hasattr(
        module, "compile_subgraph_reason"
    ):
        return True
    # AOTAutograd's graphs take their inputs in a list that they empty.
    return type(getattr(module.graph, "_codegen", None)).__name__ == "_BoxedCodeGen"
