"""Replay rules that read operands through a node's edges: sums, copies, products.

Where a node forgets an operand (the number in `x + 1.0`, the value of `masked_fill`) it is seen
where it is given (`_calls`). Where it forgets another argument (the memory format of
`contiguous`) there is no rule, or `unfit` says of which nodes it knows too little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .._replay import Node, Operand, Rule, output_facts
from .._views import signed, signed_all
from ._probes import IMAGES, ROWS, WIDE, WIDTH, matrix, of_one

aten = torch.ops.aten

_PAIR = (Operand(0), Operand(1))


def _typed(node: Node, made: torch.Tensor) -> torch.Tensor:
    """In the dtype of the node's output: an in-place operator keeps that of its operand."""
    dtype = output_facts(node).dtype
    return made if made.dtype is dtype else made.to(dtype)


def _two(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def through(node: Node, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        made, dtype = op(one, other), output_facts(node).dtype
        if made.dtype is not dtype and not other.dim():
            # A number is saved as a tensor without dimensions, which counts as one against others.
            made = op(one, other.to(dtype))
        return _typed(node, made)

    return through


def _moved(node: Node) -> str:
    before, at = node.next_functions[0]
    facts, given = output_facts(node), output_facts(before, at)
    is_on_one = facts is not None and given is not None and facts.device == given.device
    return "" if is_on_one else "may have copied from another device"


EDGE_RULES = (
    # Sums, and what is put together.
    Rule(
        "AddBackward0",
        aten.add.Tensor,
        None,
        through=lambda n, a, b: _typed(n, torch.add(a, b, alpha=n._saved_alpha)),
        operands=_PAIR,
        edge_probes=(
            lambda make: make(ROWS, WIDTH) + make(WIDTH),
            lambda make: torch.add(make(ROWS, WIDTH), make(ROWS, WIDTH), alpha=3),
        ),
    ),
    Rule(
        "SubBackward0",
        aten.sub.Tensor,
        None,
        through=lambda n, a, b: _typed(n, torch.sub(a, b, alpha=n._saved_alpha)),
        operands=_PAIR,
        edge_probes=(lambda make: make(ROWS, WIDTH) - make(WIDTH),),
    ),
    *(
        Rule(
            node,
            op,
            None,
            through=lambda n, a, b: _typed(n, torch.rsub(a, b, alpha=n._saved_alpha)),
            operands=_PAIR,
            edge_probes=(probe,),
        )
        for node, op, probe in (
            (
                "RsubBackward0",
                aten.rsub.Tensor,
                lambda make: torch.rsub(make(ROWS, WIDTH), make(WIDTH).detach()),
            ),
            ("RsubBackward1", aten.rsub.Scalar, lambda make: 0.7 - make(ROWS, WIDTH)),
        )
    ),
    *(
        Rule(
            node,
            op,
            None,
            through=lambda n, x, value: x.masked_fill(n._saved_mask, value),
            operands=_PAIR,
            edge_probes=(probe,),
        )
        for node, op, probe in (
            (
                "MaskedFillBackward0",
                aten.masked_fill.Scalar,
                lambda make: matrix(make).masked_fill(matrix(make).detach() > 0, -1e4),
            ),
            (
                "MaskedFillBackward1",
                aten.masked_fill.Tensor,
                lambda make: matrix(make).masked_fill(matrix(make).detach() > 0, make().detach()),
            ),
        )
    ),
    Rule(
        "ConstantPadNdBackward0",
        aten.constant_pad_nd.default,
        None,
        through=lambda n, x, value: aten.constant_pad_nd(x, signed_all(n._saved_pad), value),
        operands=_PAIR,
        edge_probes=(
            lambda make: F.pad(make(*IMAGES), (1, 2)),
            lambda make: F.pad(make(*IMAGES), (-1, 0, 2, 0), value=0.5),
        ),
    ),
    Rule(
        "BaddbmmBackward0",
        aten.baddbmm.default,
        None,
        through=lambda n, a, b, c: _typed(
            n, torch.baddbmm(a, b, c, beta=n._saved_beta, alpha=n._saved_alpha)
        ),
        operands=(Operand(0), Operand(1, "_saved_batch1", 2), Operand(2, "_saved_batch2", 1)),
        edge_probes=(
            lambda make: torch.baddbmm(
                make(1, 1, ROWS).detach(), make(2, ROWS, WIDTH), make(2, WIDTH, ROWS), alpha=0.3
            ),
        ),
    ),
    Rule(
        "AddcmulBackward0",
        aten.addcmul.default,
        None,
        through=lambda n, a, b, c: _typed(n, torch.addcmul(a, b, c, value=n._saved_value)),
        operands=(Operand(0), Operand(1, "_saved_tensor1", 2), Operand(2, "_saved_tensor2", 1)),
        edge_probes=(
            lambda make: torch.addcmul(matrix(make), make(WIDTH), matrix(make), value=0.3),
            lambda make: torch.addcmul(matrix(make), make(WIDTH).detach(), matrix(make)),
        ),
    ),
    Rule(
        "LerpBackward0",
        aten.lerp.Scalar,
        None,
        through=lambda n, a, b: _typed(n, torch.lerp(a, b, n._saved_weight)),
        operands=_PAIR,
        edge_probes=(lambda make: torch.lerp(matrix(make), make(WIDTH), 0.3),),
    ),
    Rule(
        "CatBackward0",
        aten.cat.default,
        None,
        through=lambda n, *parts: torch.cat(parts, signed(n._saved_dim)),
        operands=None,
        edge_probes=(lambda make: torch.cat([make(ROWS, WIDTH), make(ROWS, WIDE)], -1),),
    ),
    Rule(
        "StackBackward0",
        aten.stack.default,
        None,
        through=lambda n, *parts: torch.stack(parts, signed(n._saved_dim)),
        operands=None,
        edge_probes=(lambda make: torch.stack([make(ROWS, WIDTH), make(ROWS, WIDTH)], -1),),
    ),
    Rule(
        "WhereBackward0",
        aten.where.self,
        None,
        through=lambda n, a, b: torch.where(n._saved_condition, a, b),
        operands=_PAIR,
        edge_probes=(
            lambda make: torch.where(matrix(make).detach() > 0, matrix(make), make(WIDTH)),
        ),
    ),
    # Copies.
    of_one(
        "CloneBackward0",
        aten.clone.default,
        lambda n, x: x.clone(memory_format=torch.contiguous_format),
        lambda make: make(WIDTH, ROWS).clone(),
    ),
    of_one(
        "ToCopyBackward0",
        aten._to_copy.default,
        lambda n, x: x.to(output_facts(n).dtype, copy=True),
        lambda make: matrix(make).to(
            torch.float32 if matrix(make).dtype is not torch.float32 else torch.float64
        ),
        unfit=_moved,
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
    # Products of groups of rows.
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
            lambda make: make(ROWS, WIDTH) * make(WIDTH).detach(),
            lambda make: make(WIDTH).detach() * make(ROWS, WIDTH),
            lambda make: make(ROWS, WIDTH) * 0.7,
        ),
    },
    "DivBackward0": {
        "through": _two(torch.div),
        "operands": (Operand(0, "_saved_self", 1), Operand(1, "_saved_other")),
        "edge_probes": (
            lambda make: make(ROWS, WIDTH) / make(WIDTH).detach(),
            lambda make: make(ROWS, WIDTH) / 0.7,
        ),
    },
    "MmBackward0": {
        "through": lambda n, a, b: torch.mm(a, b),
        "operands": _MATRICES,
        "edge_probes": (
            lambda make: torch.mm(make(ROWS, WIDTH), make(WIDTH, ROWS).detach()),
            lambda make: torch.mm(make(ROWS, WIDTH).detach(), make(WIDTH, ROWS)),
        ),
    },
    "BmmBackward0": {
        "through": lambda n, a, b: torch.bmm(a, b),
        "operands": _MATRICES,
        "edge_probes": (
            lambda make: torch.bmm(make(2, ROWS, WIDTH), make(2, WIDTH, ROWS).detach()),
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
            lambda make: torch.addmm(make(ROWS), make(ROWS, WIDTH), make(WIDTH, ROWS).detach()),
        ),
    },
}
"""By node: what a rule of `_replay_table` needs to read operands at edges."""
