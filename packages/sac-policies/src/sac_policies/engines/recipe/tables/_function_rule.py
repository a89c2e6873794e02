"""The rule for an autograd function that nobody gave one: its forward, run again.

Rule 1. The node of a function leads to its arguments only where each is a tensor that needs a
        gradient: each has an edge then. Nothing tells what else a call was given.
Rule 2. A forward is run again only where it was seen to depend on its arguments alone: on small
        tensors its operators are torch's own, draw nothing, and read and write nothing but the
        arguments and what they made; under autocast it gives the same; its code stores nothing
        but attributes of its context. What it does besides in Python happens again, as in full
        checkpointing.
Rule 3. A policy that saves an operator which runs in it saves what the function returns.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from ...._tensors import tensors_in
from ...._torch_compat import storage_key
from ...._torch_compat._function_nodes import function_of
from ...._watching_mode import WatchingMode
from ....policies._operators import facts_of
from .._replay import Node, Rule, alone, output_facts, ramp

MOST_ELEMENTS, MOST_SIZE = 1 << 16, 64
"""Operands with more elements are tried with sizes of at most so many."""
_OPERATORS = frozenset({"aten", "prims"})
_LIFTED = frozenset({torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default})

Function = type[torch.autograd.Function]


class ImpureError(Exception):
    """Says what a forward does that a second run of it would not do alike."""


def unknown_arguments(node: Node) -> str:
    """Why the arguments of a function's call are not known; "" where they are (Rule 1)."""
    edges, needed = node.next_functions, node.needs_input_grad
    made = output_facts(node)
    if made is None or len(needed) != len(edges) or not all(needed):
        return "was given more than tensors that need a gradient"
    facts = [_facts_behind(*edge) for edge in edges]
    if any(each is None or _place(each) != _place(made) for each in facts):
        return "was given, or returns, tensors of more than one dtype or device"
    return ""


def _other_arguments(node: Node, count: int) -> str:
    if len(node.next_functions) != count:
        return f"was given {len(node.next_functions)} tensors, and {count} when it was tried"
    return unknown_arguments(node)


def rule_for(node: Node) -> Rule | str:
    """Make the rule for a function's nodes, or say why there is none.

    Args:
        node: one whose arguments are known.
    """
    kind: Any = type(node)
    function, made = function_of(kind), output_facts(node)
    assert function is not None
    if reason := _stores(function):
        return reason
    shapes = [tuple(_facts_behind(*edge).shape) for edge in node.next_functions]
    if sum(torch.Size(shape).numel() for shape in shapes) > MOST_ELEMENTS:
        shapes = [tuple(min(size, MOST_SIZE) for size in shape) for shape in shapes]
    watched = alone(lambda: _watched(function, shapes, made.dtype, made.device))
    if not isinstance(watched, list):
        return watched or "could not be tried"

    def probe(make: Callable[..., torch.Tensor]) -> torch.Tensor:
        return _first(function.apply(*(make(*shape) for shape in shapes)))

    return Rule(
        kind.__name__,
        watched[-1],
        None,
        through=lambda node, *operands: _forward(function, operands)[0],
        operands=None,
        edge_probes=(probe,),
        unfit=lambda node: _other_arguments(node, len(shapes)),
        runs=tuple(dict.fromkeys(watched)),
    )


def _watched(
    function: Function, shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[Any] | str:
    """The operators that a forward runs, the last one last, or what forbids to run it again."""
    make = ramp(dtype, device)
    operands = [make(*shape).detach() for shape in shapes]
    before = [each.clone() for each in operands]
    try:
        with torch.no_grad(), _Watch(operands) as watch:
            out, context = _forward(function, operands)
        with torch.no_grad(), torch.autocast(device.type):
            cast, _ = _forward(function, operands)
    except ImpureError as error:
        return f"{error}"
    except Exception as error:  # whatever the code of others raises
        return f"raises {type(error).__name__}: {error}".partition("\n")[0]
    if getattr(context, "dirty_tensors", None) or getattr(context, "non_differentiable", None):
        return "marks arguments as written to, or results as without a gradient"
    if not all(map(torch.equal, before, operands)):
        return "writes to its arguments"
    if storage_key(out) in set(map(storage_key, operands)):
        return "returns a view of an argument"
    if cast.dtype != out.dtype or not torch.equal(cast, out):
        return "gives something else under autocast"
    return watch.ops or "runs no operator of torch"


class _Watch(WatchingMode):
    """Lets a forward run as long as it does nothing that Rule 2 forbids."""

    def __init__(self, operands: list[torch.Tensor]) -> None:
        super().__init__()
        self.ops: list[Any] = []
        self._known = set(map(storage_key, operands))
        self._made: list[torch.Tensor] = []  # as long as they live no other has their key

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given, facts = kwargs or {}, facts_of(func)
        if getattr(func, "namespace", "") not in _OPERATORS:
            raise ImpureError(f"runs {func}, which is no operator of torch")
        if facts.draws(args):
            raise ImpureError(f"draws random numbers ({func})")
        if func not in _LIFTED:
            for each in tensors_in((args, given)):
                if storage_key(each) not in self._known:
                    raise ImpureError(f"reads a tensor that it was not given ({func})")
        out = func(*args, **given)
        for each in tensors_in(out):
            self._known.add(storage_key(each))
            self._made.append(each)
        if not (facts.is_view or facts.bookkeeping):
            self.ops.append(func)
        return out


def _forward(function: Function, operands: Any) -> tuple[torch.Tensor, Any]:
    """Run a forward; return its first output, and what it made of its context."""
    context: Any = FunctionCtx()
    context.needs_input_grad = (True,) * len(operands)
    if function.setup_context is torch.autograd.Function.setup_context:
        return _first(function.forward(context, *operands)), context
    out = function.forward(*operands)
    function.setup_context(context, operands, out)
    return _first(out), context


def _first(out: Any) -> torch.Tensor:
    first = out[0] if isinstance(out, tuple) and out else out
    if not isinstance(first, torch.Tensor):
        raise ImpureError(f"returns a {type(first).__name__} first, not a tensor")
    return first


def _facts_behind(node: Node, output: int) -> Any:
    """`shape`, `dtype` and `device` of what is at an edge; None where nothing tells."""
    leaf = getattr(node, "variable", None)
    return output_facts(node, output) if leaf is None else leaf


def _place(facts: Any) -> tuple[torch.dtype, torch.device]:
    return facts.dtype, facts.device


def _stores(function: Function) -> str:
    """What the code of a forward stores that outlives it; "" where nothing is seen."""
    code = getattr(inspect.unwrap(function.forward), "__code__", None)
    if code is None:
        return "is not written in Python"
    context, before = code.co_varnames[:1], None
    for each in dis.get_instructions(code):
        name, at = each.opname, each.argval
        if name in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
            name == "STORE_DEREF" and at in code.co_freevars
        ):
            return f"assigns to {at}, which is not its own"
        if name == "STORE_ATTR" and not _loads(before, context):
            return f"assigns to the attribute {at} of what is not its context"
        before = each
    return ""


def _loads(instruction: dis.Instruction | None, names: tuple[str, ...]) -> bool:
    """Whether an instruction puts this local variable on top of the stack."""
    if instruction is None or not instruction.opname.startswith("LOAD_FAST"):
        return False
    at = instruction.argval
    return (at[-1:] if isinstance(at, tuple) else (at,)) == names
