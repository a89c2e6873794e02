"""Where in a model what is traced is run: the module, and spans, in the metadata of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.fx.traceback


def node_meta() -> dict[str, Any]:
    """Return the metadata that traced nodes receive now, to be changed in place."""
    meta: dict[str, Any] = getattr(torch.fx.traceback, "current_meta", {})
    return meta


def running_modules() -> str:
    """Return the dotted path of the module whose operators are being traced, "" without one.

    After it, as places do, the labels of spans that they are traced in.
    """
    meta = node_meta()
    stack = meta.get("nn_module_stack")
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    custom = meta.get("custom")
    return path if not custom else place_of(path, [custom[key] for key in custom if _is_span(key)])


_SPAN = "sac_policies.span "


def _is_span(key: object) -> bool:
    return isinstance(key, str) and key.startswith(_SPAN)


def annotated(label: str) -> Any:
    """Have what is traced meanwhile know that it is in the span with this label.

    Lost without it: policies find no spans in compiled code.
    """
    annotate = getattr(torch.fx.traceback, "annotate", None)
    return nullcontext() if annotate is None else annotate({_SPAN + label: label})


def place_of(path: str, labels: Sequence[str]) -> str:
    """Return the place of what runs in a module with this path, and in spans.

    Example:
        >>> place_of("mlp.up", ["ffn", "act"])
        'mlp.up | ffn.act'
    """
    return f"{path} | {'.'.join(labels)}" if labels else path
