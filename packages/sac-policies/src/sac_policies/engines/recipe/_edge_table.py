"""Replay rules that read operands through a node's edges: sums, copies, saved results, indexing.

Where a node forgets an argument (the number in `x + 1.0`, the value of `masked_fill`, the memory
format of `contiguous`) there is no rule, or `fits` says for which nodes it knows enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ._replay import Node, Operand, Rule, output_facts
from ._views import signed, signed_all

aten = torch.ops.aten

# Shapes of the probes, as in `_replay_table`.
_ROWS, _WIDTH, _WIDE = 5, 67, 256
_IMAGES = (2, 6, 9, 9)
_FIRST = (Operand(0),)
_PAIR = (Operand(0), Operand(1))

Make = Callable[..., torch.Tensor]


def _typed(node: Node, made: torch.Tensor) -> torch.Tensor:
    """In the dtype of the node's output: an in-place operator keeps that of its operand."""
    dtype = output_facts(node).dtype
    return made if made.dtype is dtype else made.to(dtype)


def _two(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def through(node: Node, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        made, dtype = op(one, other), output_facts(node).dtype
        # A number is saved as a tensor without dimensions, which counts as one against others.
        return made if made.dtype is dtype else op(one, other.to(dtype)).to(dtype)

    return through


def _softmax(op: Any) -> Callable[[Node, torch.Tensor], torch.Tensor]:
    def through(node: Node, x: torch.Tensor) -> torch.Tensor:
        widened = x.dtype is not output_facts(node).dtype
        made: torch.Tensor = op(x, signed(node._saved_dim), widened)
        return made

    return through


def _attention(node: Node) -> torch.Tensor:
    return aten._scaled_dot_product_flash_attention_for_cpu(
        node._saved_query,
        node._saved_key,
        node._saved_value,
        node._saved_dropout_p,
        node._saved_is_causal,
        attn_mask=node._saved_attn_mask,
        scale=node._saved_scale,
    )[0]


def _attended(*, causal: bool, width: int) -> Callable[[Make], torch.Tensor]:
    def made(make: Make) -> torch.Tensor:
        query, key, value = (make(2, 2, width, 8) for _ in range(3))
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    return made


def _is_on_one_device(node: Node) -> bool:
    before, at = node.next_functions[0]
    facts, given = output_facts(node), output_facts(before, at)
    return facts is not None and given is not None and facts.device == given.device


def _positive(make: Make) -> torch.Tensor:
    return make(_ROWS, _WIDTH).detach().abs().add_(0.1).requires_grad_()


def _unary(kind: str, op: Any, function: Any, made: Callable[..., Any] = _positive) -> Rule:
    """Of one operand; the node saves its result and knows nothing else."""
    return Rule(
        f"{kind}Backward0",
        op,
        None,
        through=lambda n, x: function(x),
        operands=_FIRST,
        keeps_result=True,
        edge_probes=(lambda make: function(made(make)),),
    )


def of_one(
    kind: str, op: Any, through: Callable[..., torch.Tensor], *probes: Any, **more: Any
) -> Rule:
    return Rule(kind, op, None, through=through, operands=_FIRST, edge_probes=probes, **more)


def matrix(make: Make) -> torch.Tensor:
    return make(_ROWS, _WIDTH)


EDGE_RULES = (
    # Sums, and what is put together.
    Rule(
        "AddBackward0",
        aten.add.Tensor,
        None,
        through=lambda n, a, b: _typed(n, torch.add(a, b, alpha=n._saved_alpha)),
        operands=_PAIR,
        edge_probes=(
            lambda make: make(_ROWS, _WIDTH) + make(_WIDTH),
            lambda make: torch.add(make(_ROWS, _WIDTH), make(_ROWS, _WIDTH), alpha=3),
        ),
    ),
    Rule(
        "SubBackward0",
        aten.sub.Tensor,
        None,
        through=lambda n, a, b: _typed(n, torch.sub(a, b, alpha=n._saved_alpha)),
        operands=_PAIR,
        edge_probes=(lambda make: make(_ROWS, _WIDTH) - make(_WIDTH),),
    ),
    Rule(
        "CatBackward0",
        aten.cat.default,
        None,
        through=lambda n, *parts: torch.cat(parts, signed(n._saved_dim)),
        operands=None,
        edge_probes=(lambda make: torch.cat([make(_ROWS, _WIDTH), make(_ROWS, _WIDE)], -1),),
    ),
    Rule(
        "StackBackward0",
        aten.stack.default,
        None,
        through=lambda n, *parts: torch.stack(parts, signed(n._saved_dim)),
        operands=None,
        edge_probes=(lambda make: torch.stack([make(_ROWS, _WIDTH), make(_ROWS, _WIDTH)], -1),),
    ),
    Rule(
        "WhereBackward0",
        aten.where.self,
        None,
        through=lambda n, a, b: torch.where(n._saved_condition, a, b),
        operands=_PAIR,
        edge_probes=(
            lambda make: torch.where(matrix(make).detach() > 0, matrix(make), make(_WIDTH)),
        ),
    ),
    # Copies.
    of_one(
        "CloneBackward0",
        aten.clone.default,
        lambda n, x: x.clone(memory_format=torch.contiguous_format),
        lambda make: make(_WIDTH, _ROWS).clone(),
    ),
    of_one(
        "ToCopyBackward0",
        aten._to_copy.default,
        lambda n, x: x.to(output_facts(n).dtype, copy=True),
        lambda make: matrix(make).to(
            torch.float32 if matrix(make).dtype is not torch.float32 else torch.float64
        ),
        fits=_is_on_one_device,
    ),
    of_one(
        "MulBackward1",
        aten.mul.Scalar,
        lambda n, x: aten.mul.Scalar(x, n._saved_other),
        lambda make: aten.mul.Scalar(matrix(make), 0.7),
    ),
    of_one(
        "DivBackward1",
        aten.div.Scalar,
        lambda n, x: aten.div.Scalar(x, n._saved_other),
        lambda make: aten.div.Scalar(matrix(make), 0.7),
    ),
    of_one("NegBackward0", aten.neg.default, lambda n, x: -x, lambda make: -matrix(make)),
    of_one(
        "RepeatBackward0",
        aten.repeat.default,
        lambda n, x: x.repeat(signed_all(n._saved_repeats)),
        lambda make: matrix(make).repeat(2, 3),
    ),
    of_one(
        "FlipBackward0",
        aten.flip.default,
        lambda n, x: x.flip(signed_all(n._saved_dims)),
        lambda make: matrix(make).flip(-1),
    ),
    of_one(
        "RollBackward0",
        aten.roll.default,
        lambda n, x: x.roll(signed_all(n._saved_shifts), signed_all(n._saved_dims)),
        lambda make: matrix(make).roll(-1, -1),
    ),
    of_one(
        "TrilBackward0",
        aten.tril.default,
        lambda n, x: x.tril(signed(n._saved_diagonal)),
        lambda make: matrix(make).tril(-1),
    ),
    of_one(
        "TriuBackward0",
        aten.triu.default,
        lambda n, x: x.triu(signed(n._saved_diagonal)),
        lambda make: matrix(make).triu(-1),
    ),
    # Functions whose nodes save their result.
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
        _softmax(torch._softmax),
        lambda make: matrix(make).softmax(-1),
        lambda make: matrix(make).softmax(0),
        keeps_result=True,
    ),
    of_one(
        "LogSoftmaxBackward0",
        aten._log_softmax.default,
        _softmax(torch._log_softmax),
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
    Rule(
        "GroupedMmBackward0",
        aten._grouped_mm.default if hasattr(aten, "_grouped_mm") else None,
        None,
        through=lambda n, a, b: aten._grouped_mm(a, b, n._saved_offs),
        operands=(Operand(0, "_saved_self", 1), Operand(1, "_saved_mat2", 0)),
        edge_probes=(
            lambda make: aten._grouped_mm(
                make(8, 16),
                make(2, 16, 32),
                torch.tensor([3, 8], dtype=torch.int32, device=make(1).device),
            ),
        ),
    ),
    Rule(
        "ScaledDotProductFlashAttentionForCpuBackward0",
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        _attention,
        tuple(
            _attended(causal=causal, width=width)
            for causal in (False, True)
            for width in (_WIDTH, 128)
        ),
        # A node that saved its query saved the others: each needs all of them.
        results=1,
        keeps_result=True,
    ),
)

_PRODUCT = (Operand(0, "_saved_self", 1), Operand(1, "_saved_other", 0))
_MATRICES = (Operand(0, "_saved_self", 1), Operand(1, "_saved_mat2", 0))


def _scaled(node: Node, bias: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> Any:
    return torch.addmm(bias, one, other, beta=node._saved_beta, alpha=node._saved_alpha)


THROUGH: dict[str, dict[str, Any]] = {
    "MulBackward0": {
        "through": _two(torch.mul),
        "operands": _PRODUCT,
        "edge_probes": (
            lambda make: make(_ROWS, _WIDTH) * make(_WIDTH).detach(),
            lambda make: make(_WIDTH).detach() * make(_ROWS, _WIDTH),
            lambda make: make(_ROWS, _WIDTH) * 0.7,
        ),
    },
    "DivBackward0": {
        "through": _two(torch.div),
        "operands": (Operand(0, "_saved_self", 1), Operand(1, "_saved_other")),
        "edge_probes": (
            lambda make: make(_ROWS, _WIDTH) / make(_WIDTH).detach(),
            lambda make: make(_ROWS, _WIDTH) / 0.7,
        ),
    },
    "MmBackward0": {
        "through": lambda n, a, b: torch.mm(a, b),
        "operands": _MATRICES,
        "edge_probes": (
            lambda make: torch.mm(make(_ROWS, _WIDTH), make(_WIDTH, _ROWS).detach()),
            lambda make: torch.mm(make(_ROWS, _WIDTH).detach(), make(_WIDTH, _ROWS)),
        ),
    },
    "BmmBackward0": {
        "through": lambda n, a, b: torch.bmm(a, b),
        "operands": _MATRICES,
        "edge_probes": (
            lambda make: torch.bmm(make(2, _ROWS, _WIDTH), make(2, _WIDTH, _ROWS).detach()),
        ),
    },
    "AddmmBackward0": {
        "through": _scaled,
        "operands": (
            Operand(0),
            Operand(1, "_saved_mat1", 2),
            Operand(2, "_saved_mat2", 1),
        ),
        "edge_probes": (
            lambda make: torch.addmm(
                make(_ROWS), make(_ROWS, _WIDTH), make(_WIDTH, _ROWS).detach()
            ),
        ),
    },
}
"""By node: what a rule of `_replay_table` needs to read operands at edges."""
