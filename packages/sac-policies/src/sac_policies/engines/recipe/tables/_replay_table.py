"""The table of replay rules: which nodes can be rebuilt, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .._replay import Node, Rule
from .._views import optional, signed, signed_all
from ._attention_table import ATTENTION_RULES
from ._dropout_table import DROPOUT_RULES
from ._edge_table import EDGE_RULES, THROUGH
from ._guessed_eps import EpsGuess, from_statistics
from ._picked_table import PICKED_RULES
from ._probes import CHANNELS, IMAGES, KERNELS, ROWS, WIDE, WIDTH
from ._result_table import RESULT_RULES
from ._stored_table import STORED_RULES

aten = torch.ops.aten


def _rms_norm(node: Node) -> torch.Tensor:
    x, rstd = node._saved_input, node._saved_result1
    y = x.to(rstd.dtype) * rstd
    return (y if node._saved_weight is None else y * node._saved_weight).to(x.dtype)


def _batch_norm(node: Node, bias: torch.Tensor | None) -> torch.Tensor:
    """Run it without running statistics where the batch's own are used: nothing is updated."""
    training = node._saved_training
    return aten.native_batch_norm(
        node._saved_input,
        node._saved_weight,
        bias,
        None if training else node._saved_running_mean,
        None if training else node._saved_running_var,
        training,
        0.0,
        node._saved_eps,
    )[0]


def _group_norm(node: Node, bias: torch.Tensor | None) -> torch.Tensor:
    return aten.native_group_norm(
        # In its own memory format: kernels sum in another order for channels-last.
        node._saved_input,
        node._saved_weight,
        bias,
        node._saved_N,
        node._saved_C,
        node._saved_HxW,
        node._saved_group,
        node._saved_eps,
    )[0]


def _convolution(node: Node, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.convolution(
        node._saved_input,
        node._saved_weight,
        bias,
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
    )


def _addmm(node: Node, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.addmm(
        bias,  # type: ignore[arg-type]  # an addmm has one
        node._saved_mat1,
        node._saved_mat2,
        beta=node._saved_beta,
        alpha=node._saved_alpha,
    )


def _clamp(node: Node) -> torch.Tensor:
    return torch.clamp(node._saved_self, node._saved_min, node._saved_max)


def _unary(kind: str, op: Any, rebuild: Callable[[Node], torch.Tensor]) -> Rule:
    return Rule(f"{kind}Backward0", op, rebuild, (lambda make: op(make(ROWS, WIDTH)),))


_RULES = (
    # Matrix products and convolutions.
    Rule(
        "MmBackward0",
        aten.mm.default,
        lambda n: torch.mm(n._saved_self, n._saved_mat2),
        (lambda make: torch.mm(make(ROWS, WIDTH), make(WIDTH, ROWS)),),
        needs=(0, 1),
    ),
    Rule(
        "AddmmBackward0",
        aten.addmm.default,
        _addmm,
        (lambda make: torch.addmm(make(ROWS), make(ROWS, WIDTH), make(WIDTH, ROWS)),),
        needs=(0, 1, 2),
        leaf=0,
    ),
    Rule(
        "BmmBackward0",
        aten.bmm.default,
        lambda n: torch.bmm(n._saved_self, n._saved_mat2),
        (lambda make: torch.bmm(make(ROWS, ROWS, WIDTH), make(ROWS, WIDTH, ROWS)),),
        needs=(0, 1),
    ),
    Rule(
        "ConvolutionBackward0",
        aten.convolution.default,
        _convolution,
        (
            lambda make: F.conv2d(make(*IMAGES), make(*KERNELS), make(CHANNELS), padding=1),
            lambda make: F.conv2d(make(*IMAGES), make(*KERNELS), stride=2),
        ),
        leaf=2,
        absent=lambda n: tuple(n._saved_bias_sym_sizes_opt) == (0,),
    ),
    # Normalisations.
    Rule(
        "NativeLayerNormBackward0",
        aten.native_layer_norm.default,
        from_statistics,
        (
            lambda make: F.layer_norm(make(ROWS, WIDTH), (WIDTH,), make(WIDTH), make(WIDTH)),
            lambda make: F.layer_norm(make(ROWS, WIDE), (WIDE,), make(WIDE), make(WIDE), 1e-3),
            lambda make: F.layer_norm(make(ROWS, WIDTH), (WIDTH,), make(WIDTH)),
            lambda make: F.layer_norm(make(ROWS, WIDTH), (WIDTH,)),
        ),
        results=2,
        guess=EpsGuess(),
    ),
    Rule(
        "FusedRmsNormBackward0",
        aten._fused_rms_norm.default if hasattr(aten, "_fused_rms_norm") else None,
        _rms_norm,
        (
            lambda make: F.rms_norm(make(ROWS, WIDTH), (WIDTH,), make(WIDTH)),
            lambda make: F.rms_norm(make(ROWS, WIDE), (WIDE,), eps=1e-3),
        ),
        results=1,
    ),
    Rule(
        "NativeBatchNormBackward0",
        aten.native_batch_norm.default,
        _batch_norm,
        (
            lambda make: F.batch_norm(
                make(*IMAGES), None, None, make(CHANNELS), make(CHANNELS), training=True
            ),
            lambda make: F.batch_norm(
                make(*IMAGES),
                torch.zeros_like(make(CHANNELS)),
                torch.ones_like(make(CHANNELS)),
                make(CHANNELS),
                make(CHANNELS),
            ),
        ),
        needs=(1, 2),
        leaf=2,
        results=2,
    ),
    Rule(
        "NativeGroupNormBackward0",
        aten.native_group_norm.default,
        _group_norm,
        (
            lambda make: F.group_norm(make(*IMAGES), 2, make(CHANNELS), make(CHANNELS), 1e-3),
            lambda make: F.group_norm(
                make(*IMAGES).contiguous(memory_format=torch.channels_last),
                2,
                make(CHANNELS),
                make(CHANNELS),
                1e-3,
            ),
        ),
        needs=(1, 2),
        leaf=2,
    ),
    # Products of two values.
    Rule(
        "MulBackward0",
        aten.mul.Tensor,
        lambda n: torch.mul(n._saved_self, n._saved_other),
        (lambda make: make(ROWS, WIDTH) * make(WIDTH),),
        needs=(0, 1),
    ),
    Rule(
        "DivBackward0",
        aten.div.Tensor,
        lambda n: torch.div(n._saved_self, n._saved_other),
        (lambda make: make(ROWS, WIDTH) / make(WIDTH),),
        needs=(0, 1),
    ),
    # Functions of one value that save what they read.
    _unary("Silu", aten.silu.default, lambda n: F.silu(n._saved_self)),
    _unary("Mish", aten.mish.default, lambda n: F.mish(n._saved_self)),
    _unary("Hardswish", aten.hardswish.default, lambda n: F.hardswish(n._saved_self)),
    _unary("Sin", aten.sin.default, lambda n: torch.sin(n._saved_self)),
    _unary("Cos", aten.cos.default, lambda n: torch.cos(n._saved_self)),
    _unary("Abs", aten.abs.default, lambda n: torch.abs(n._saved_self)),
    Rule(
        "GeluBackward0",
        aten.gelu.default,
        lambda n: F.gelu(n._saved_self, approximate=n._saved_approximate),
        (
            lambda make: F.gelu(make(ROWS, WIDTH)),
            lambda make: F.gelu(make(ROWS, WIDTH), approximate="tanh"),
        ),
    ),
    Rule(
        "ClampBackward1",
        aten.clamp.default,
        _clamp,
        (lambda make: make(ROWS, WIDTH).clamp(-0.3, 0.7), lambda make: make(ROWS, WIDTH).clamp(0)),
    ),
    _unary("Erf", aten.erf.default, lambda n: torch.erf(n._saved_self)),
    Rule(
        "EluBackward0",
        aten.elu.default,
        lambda n: aten.elu(n._saved_self, n._saved_alpha, n._saved_scale, n._saved_input_scale),
        (lambda make: F.elu(make(ROWS, WIDTH), 0.7), lambda make: F.selu(make(ROWS, WIDTH))),
    ),
    Rule(
        "HardtanhBackward0",
        aten.hardtanh.default,
        lambda n: F.hardtanh(n._saved_self, n._saved_min_val, n._saved_max_val),
        (lambda make: F.relu6(make(ROWS, WIDTH)), lambda make: F.hardtanh(make(ROWS, WIDTH))),
    ),
    Rule(
        "PowBackward0",
        aten.pow.Tensor_Scalar,
        lambda n: torch.pow(n._saved_self, n._saved_exponent),
        (lambda make: make(ROWS, WIDTH) ** 2, lambda make: make(ROWS, WIDTH) ** 3),
    ),
    Rule(
        "LeakyReluBackward0",
        aten.leaky_relu.default,
        lambda n: F.leaky_relu(n._saved_self, n._saved_negative_slope),
        (lambda make: F.leaky_relu(make(ROWS, WIDTH), 0.3),),
    ),
    Rule(
        "SoftplusBackward0",
        aten.softplus.default,
        lambda n: F.softplus(n._saved_self, n._saved_beta, n._saved_threshold),
        (lambda make: F.softplus(make(ROWS, WIDTH), 2.0, 10.0),),
    ),
    Rule(
        "GluBackward0",
        aten.glu.default,
        lambda n: F.glu(n._saved_self, signed(n._saved_dim)),
        (lambda make: F.glu(make(ROWS, WIDE)),),
    ),
    # Windows of an image.
    Rule(
        "AvgPool2DBackward0",
        aten.avg_pool2d.default,
        lambda n: aten.avg_pool2d(
            n._saved_self,
            signed_all(n._saved_kernel_size),
            signed_all(n._saved_stride),
            signed_all(n._saved_padding),
            n._saved_ceil_mode,
            n._saved_count_include_pad,
            optional(n._saved_divisor_override),
        ),
        (
            lambda make: F.avg_pool2d(make(*IMAGES), 2),
            lambda make: F.avg_pool2d(make(*IMAGES), 3, 2, 1, True, False),
            lambda make: F.avg_pool2d(make(*IMAGES), 2, divisor_override=-3),
        ),
    ),
    # Rows of a table.
    Rule(
        "EmbeddingBackward0",
        aten.embedding.default,
        lambda n, table: F.embedding(n._saved_indices, table),
        (lambda make: F.embedding(torch.arange(ROWS, device=make(1).device), make(WIDTH, ROWS)),),
        leaf=0,
    ),
)

_OTHERS = (
    *EDGE_RULES,
    *RESULT_RULES,
    *ATTENTION_RULES,
    *DROPOUT_RULES,
    *PICKED_RULES,
    *STORED_RULES,
)

RULES = {
    rule.node: dataclasses.replace(rule, **THROUGH.get(rule.node, {}))
    for rule in (*_RULES, *_OTHERS)
    if rule.op is not None
}
"""Name of an autograd node to its rule; `Rule.works` says whether it is used."""

DIRECT = tuple(rule for rule in _RULES if rule.op is not None)
"""Rules of nodes that mostly save all they read: a policy is to decide every call alike."""
