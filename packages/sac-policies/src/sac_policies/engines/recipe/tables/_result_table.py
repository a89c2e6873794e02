"""Replay rules through edges for nodes that save their result: activations, softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._replay import Node, Operand, Rule, output_facts
from .._views import signed
from ._probes import ROWS, WIDTH, Make, matrix, of_one

aten = torch.ops.aten


def _softmax(op: Any) -> Callable[[Node, torch.Tensor], torch.Tensor]:
    def through(node: Node, x: torch.Tensor) -> torch.Tensor:
        widened = x.dtype is not output_facts(node).dtype
        made: torch.Tensor = op(x, signed(node._saved_dim), widened)
        return made

    return through


def _positive(make: Make) -> torch.Tensor:
    return make(ROWS, WIDTH).detach().abs().add_(0.1).requires_grad_()


def _unary(kind: str, op: Any, function: Any, made: Callable[..., Any] = _positive) -> Rule:
    """Of one operand; the node saves its result and knows nothing else."""
    return Rule(
        f"{kind}Backward0",
        op,
        None,
        through=lambda n, x: function(x),
        operands=(Operand(0),),
        keeps_result=True,
        edge_probes=(lambda make: function(made(make)),),
    )


RESULT_RULES = (
    _unary("Tanh", aten.tanh.default, torch.tanh, matrix),
    _unary("Sigmoid", aten.sigmoid.default, torch.sigmoid, matrix),
    _unary("Relu", aten.relu.default, torch.relu, matrix),
    _unary("Exp", aten.exp.default, torch.exp, matrix),
    _unary("Expm1", aten.expm1.default, torch.expm1, matrix),
    _unary("Sqrt", aten.sqrt.default, torch.sqrt),
    _unary("Rsqrt", aten.rsqrt.default, torch.rsqrt),
    _unary("Reciprocal", aten.reciprocal.default, torch.reciprocal),
    of_one(
        "SoftmaxBackward0",
        aten._softmax.default,
        _softmax(aten._softmax),
        lambda make: matrix(make).softmax(-1),
        lambda make: matrix(make).softmax(0),
        keeps_result=True,
    ),
    of_one(
        "LogSoftmaxBackward0",
        aten._log_softmax.default,
        _softmax(aten._log_softmax),
        lambda make: matrix(make).log_softmax(-1),
        lambda make: matrix(make).log_softmax(0),
        keeps_result=True,
    ),
    of_one(
        "SafeSoftmaxBackward0",
        aten._safe_softmax.default if hasattr(aten, "_safe_softmax") else None,
        lambda n, x: aten._safe_softmax(x, signed(n._saved_dim)),
        lambda make: aten._safe_softmax(matrix(make), -1),
        keeps_result=True,
    ),
)
