"""Where in a model a traced operator runs: the module, in the metadata of nodes."""

from __future__ import annotations

from typing import Any

import torch.fx.traceback


def node_meta() -> dict[str, Any]:
    """Return the metadata that traced nodes receive now, to be changed in place."""
    meta: dict[str, Any] = getattr(torch.fx.traceback, "current_meta", {})
    return meta


def running_modules() -> str:
    """Return the dotted path of the module whose operators are being traced, "" without one."""
    stack = node_meta().get("nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""
