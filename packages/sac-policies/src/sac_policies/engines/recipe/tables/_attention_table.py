"""The replay rule for attention in one kernel: a row for each that torch has.

Rule 1. Their nodes save what they read, then their results. A replay gives the kernel the same
        arguments, by the names that the node saved them under.
Rule 2. A kernel draws what its dropout leaves out by itself. Its node has the random state, for its
        backward, but no operator takes one in a forward: what a dropout was part of is kept.
Rule 3. An operator with an argument that is not known here has no rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._replay import Node, Rule
from ._probes import WIDTH, Make

aten = torch.ops.aten

_KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "flash_attention_for_cpu": ("attn_mask", {}),
    "flash_attention": ("", {}),
    # Both leave out what their backward reads unless they are told not to.
    "efficient_attention": ("attn_bias", {"compute_log_sumexp": True}),
    "cudnn_attention": ("attn_bias", {"compute_log_sumexp": True}),
    "fused_attention_overrideable": ("attn_bias", {}),
}
"""By the end of an operator's name: what it calls the mask that is added to scores, "" where it
takes none, and what it is given besides."""
_ALIKE = frozenset({"dropout_p", "compute_log_sumexp", "return_debug_mask"})
"""What else they are given: it makes no difference to what is replayed."""
_PROBED = tuple((width, causal) for width in (WIDTH, 128) for causal in (False, True))
"""Lengths of sequences, and whether each sees only what came before it."""


def _drew(node: Node) -> str:
    drops = node._saved_dropout_p > 0
    return "drew its dropout in a kernel that takes no random state" if drops else ""


def _again(op: Any, names: tuple[str, ...], more: dict[str, Any]) -> Callable[[Node], torch.Tensor]:
    def rebuild(node: Node) -> torch.Tensor:
        given = {name: getattr(node, f"_saved_{name}") for name in names}
        made: torch.Tensor = op(**given, **more)[0]
        return made

    return rebuild


def _probe(
    op: Any, given: dict[str, Any], width: int, causal: bool
) -> Callable[[Make], torch.Tensor]:
    def made(make: Make) -> torch.Tensor:
        query, key, value = (make(2, 2, width, 64) for _ in range(3))
        attended: torch.Tensor = op(query, key, value, is_causal=causal, **given)[0]
        return attended

    return made


def _rule(end: str, mask: str, more: dict[str, Any]) -> Rule:
    name = f"scaled_dot_product_{end}"
    op = getattr(getattr(aten, f"_{name}", None), "default", None)
    names = ("query", "key", "value", "is_causal", "scale", *((mask,) if mask else ()))
    known = op is not None and {each.name for each in op._schema.arguments} <= _ALIKE | {*names}
    given = {**more, mask: None} if mask else more
    return Rule(
        "".join(map(str.capitalize, name.split("_"))) + "Backward0",
        op if known else None,
        _again(op, names, more),
        tuple(_probe(op, given, *probed) for probed in _PROBED),
        # What it saves before its output; a node that saved its query saved the others: each
        # needs all of them.
        results=1,
        keeps_result=True,
        unfit=_drew,
    )


ATTENTION_RULES = tuple(_rule(end, *about) for end, about in _KERNELS.items())
