"""Replay rules for nodes that save every operand they read, as most of the table's do.

Policies that decide single calls keep what these make, as for rules through edges: they are asked
about far fewer regions than products and the common activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .._replay import Node, Rule, output_facts
from .._views import signed_all
from ._probes import IMAGES, ROWS, WIDTH, Make, matrix

aten = torch.ops.aten


def _of_self(kind: str, op: Any, function: Callable[..., torch.Tensor], *names: str) -> Rule:
    """Of one value and of numbers that the node saves by these names."""

    def rebuild(node: Node) -> torch.Tensor:
        return function(node._saved_self, *(getattr(node, f"_saved_{name}") for name in names))

    numbers = (0.4,) * len(names)
    return Rule(f"{kind}Backward0", op, rebuild, (lambda make: function(matrix(make), *numbers),))


def _of_positive(kind: str, op: Any, function: Callable[..., torch.Tensor]) -> Rule:
    def probe(make: Make) -> torch.Tensor:
        return function(matrix(make).detach().abs().add_(0.1).requires_grad_())

    return Rule(f"{kind}Backward0", op, lambda n: function(n._saved_self), (probe,))


def _of_two(kind: str, op: Any, function: Callable[..., torch.Tensor]) -> Rule:
    return Rule(
        f"{kind}Backward0",
        op,
        lambda n: function(n._saved_self, n._saved_other),
        (lambda make: function(matrix(make), make(WIDTH)),),
    )


def _max_pool(node: Node) -> torch.Tensor:
    return aten.max_pool2d_with_indices(
        node._saved_self,
        signed_all(node._saved_kernel_size),
        signed_all(node._saved_stride),
        signed_all(node._saved_padding),
        signed_all(node._saved_dilation),
        node._saved_ceil_mode,
    )[0]


def _last(make: Make) -> torch.Tensor:
    return make(*IMAGES).contiguous(memory_format=torch.channels_last)


STORED_RULES = (
    _of_two("Maximum", aten.maximum.default, torch.maximum),
    _of_two("Minimum", aten.minimum.default, torch.minimum),
    _of_positive("Log", aten.log.default, torch.log),
    _of_positive("Log1P", aten.log1p.default, torch.log1p),
    _of_self("Atan", aten.atan.default, torch.atan),
    _of_self("Erfc", aten.erfc.default, torch.erfc),
    _of_self("Hardsigmoid", aten.hardsigmoid.default, F.hardsigmoid),
    _of_self("Celu", aten.celu.default, F.celu, "alpha"),
    _of_self("Hardshrink", aten.hardshrink.default, F.hardshrink, "lambd"),
    _of_self("Softshrink", aten.softshrink.default, F.softshrink, "lambd"),
    Rule(
        "LogSigmoidBackward0",
        aten.log_sigmoid_forward.default,
        lambda n: F.logsigmoid(n._saved_self),
        (lambda make: F.logsigmoid(matrix(make)),),
        results=1,
    ),
    Rule(
        "PreluKernelBackward0",
        aten._prelu_kernel.default,
        lambda n: aten._prelu_kernel(n._saved_self, n._saved_weight),
        (
            lambda make: F.prelu(matrix(make), make(WIDTH)),
            lambda make: F.prelu(make(ROWS), make(1)),
        ),
    ),
    Rule(
        "LerpBackward1",
        aten.lerp.Tensor,
        lambda n: torch.lerp(n._saved_self, n._saved_end, n._saved_weight),
        (lambda make: torch.lerp(matrix(make), make(WIDTH), matrix(make)),),
        needs=(0, 1, 2),
    ),
    Rule(
        "MaxPool2DWithIndicesBackward0",
        aten.max_pool2d_with_indices.default,
        _max_pool,
        (
            lambda make: F.max_pool2d(make(*IMAGES), 2),
            lambda make: F.max_pool2d(_last(make), 3, 2, 1, ceil_mode=True),
        ),
        results=1,
    ),
    Rule(
        "AdaptiveAvgPool2DBackward0",
        aten._adaptive_avg_pool2d.default,
        lambda n: aten._adaptive_avg_pool2d(n._saved_self, output_facts(n).shape[-2:]),
        (
            lambda make: F.adaptive_avg_pool2d(make(*IMAGES), 4),
            lambda make: F.adaptive_avg_pool2d(_last(make), (3, 5)),
        ),
    ),
)
