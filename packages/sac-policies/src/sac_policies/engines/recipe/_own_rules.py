"""Replay rules of users, for their own autograd functions.

Rule 1. A rule belongs to the class of its function, not to a name: two of one name have two.
Rule 2. It proves itself before it is used, as ours do: when it is given, on a device of the user's
        choice, and once for each dtype and device type that it meets.
Rule 3. A result that the function saves for its own backward is kept: a recipe for it would hold
        the node that holds the recipe.
Rule 4. A function that nobody gave a rule gets one from its forward, where that can be told to
        depend on its arguments alone; it is asked for when a call of it is first met.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from ..._errors import EngineError, shown
from ..._torch_compat._function_nodes import nodes_of
from .._capturing import is_capturing
from ._replay import Node, Rule, output_facts
from .tables._function_rule import rule_for, unknown_arguments
from .tables._replay_table import RULES

_own: weakref.WeakKeyDictionary[type, Rule] = weakref.WeakKeyDictionary()
_refused: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
"""Classes whose forward is not run again, and why (Rule 4)."""
_found: dict[type, Rule] = {}
"""Of torch's classes, which last: looked up at every replay."""
_MOST_SEEN = 256
"""Nodes that a message is worth walking past."""
_on_change: list[Callable[[type], None]] = []


def rule_of(kind: type) -> Rule | None:
    """The rule for nodes of a class: a user's, or ours by the class's name."""
    own = _own.get(kind) if _own else None
    return RULES.get(kind.__name__) if own is None else own


def known_rule(kind: type) -> Rule:
    """The same for a class that has one."""
    found = _found.get(kind)
    if found is None:
        found = rule_of(kind)
        assert found is not None
        if not is_own(found):
            _found[kind] = found
    return found


def is_own(rule: Rule) -> bool:
    """Whether a rule is a user's."""
    return rule.node not in RULES


def when_changed(forget: Callable[[type], None]) -> Callable[[type], None]:
    """Have tables that remember rules told of a class whose rule is another now."""
    _on_change.append(forget)
    return forget


def rules_behind(node: Node) -> list[str]:
    """Names of autograd functions of users that a value may be rebuilt through, nearest first.

    For messages: it walks the graph, not what a replay would take.
    """
    found, seen, ahead = [], {node}, [] if node is None else [node]
    while ahead and len(seen) < _MOST_SEEN:
        node = ahead.pop(0)
        if type(node) in _own:
            found.append(type(node).__name__.removesuffix("Backward"))
        for edge, _ in node.next_functions:
            if edge is not None and edge not in seen:
                seen.add(edge)
                ahead.append(edge)
    return list(dict.fromkeys(found))


def why_not_again(node: Node) -> str:
    """Why the forward of a function without a rule is not run again; "" where it is from now on."""
    kind = type(node)
    reason = _refused.get(kind) or unknown_arguments(node)
    if reason or kind in _own:
        return reason
    found = rule_for(node)
    if isinstance(found, str):
        _refused[kind] = found
        return found
    _use(kind, found)
    return ""


def gets_a_rule(node: Node) -> bool:
    """Whether a function without a rule has one from now on; not while a graph is captured."""
    made = output_facts(node)
    return made is not None and not is_capturing(made.device) and not why_not_again(node)


def replay_rule(
    function: type[torch.autograd.Function],
    rebuild: Callable[..., torch.Tensor],
    *,
    op: torch._ops.OpOverload,
    probe: Callable[[Callable[..., torch.Tensor]], torch.Tensor],
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Say how to rebuild the output of your own autograd function from what it saved.

    Regions of the recipe engine then replay it wherever the policy does not save it, instead of
    keeping it. A second rule for the same function replaces the first.

    Args:
        function: the class whose `apply` runs in regions. Its first output is what is rebuilt.
        rebuild: from the tensors that it gave to `save_for_backward`, in their order, to that
            output: the same bits, shape, strides and dtype, in a fresh tensor. It runs in
            backward without gradients. What else the function was given it has to know itself.
        op: the operator that policies are asked about in its place, as
            `torch.ops.aten.gelu.default`: a policy that saves that one keeps this output, too.
        probe: makes one output with `function.apply` from leaf tensors that it gets from
            `make(*shape)`. The rule is held against it for each dtype and device type, bit by
            bit, before it is used there; where it fails the output is kept, and `report` says so.
        device: where the rule is tried now.
        dtype: of the leaf tensors that it is tried on now.

    Raises:
        EngineError: an argument is not valid, or the rule does not reproduce the probe's bits.

    Example:
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return 2 * ctx.saved_tensors[0] * grad
        >>> replay_rule(
        ...     Square,
        ...     lambda x: x * x,
        ...     op=torch.ops.aten.square.default,
        ...     probe=lambda make: Square.apply(make(5, 67)),
        ... )
    """
    _check(function, rebuild, probe, op)
    _check_place(device, dtype)
    kind, name = nodes_of(function), function.__name__

    def rebuilt(node: Node) -> torch.Tensor:
        saved = node.saved_tensors
        versions = [each is not None and each._version for each in saved]
        made = rebuild(*saved)
        if versions != [each is not None and each._version for each in saved]:
            raise EngineError(
                f"sac_policies.checkpoint: the rule for {name} wrote to what {name} saved, but its "
                "backward needs that as it was. Have the rule write to tensors of its own only."
            )
        return made

    rule = Rule(kind.__name__, op, rebuilt, (probe,))
    if reason := rule.why_off(dtype, str(device)):
        raise EngineError(
            f"sac_policies.replay_rule: the rule for {name} {reason} (for {dtype} on {device}), "
            "but a rule must reproduce the output of its probe, bit for bit. Rebuild it by the "
            "operators that forward runs, in their order, from what it saved."
        )
    _use(kind, rule)


def _use(kind: type, rule: Rule) -> None:
    _own[kind] = rule
    _found.pop(kind, None)
    for forget in _on_change:
        forget(kind)


def _check(function: object, rebuild: object, probe: object, op: object) -> None:
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise EngineError(
            f"sac_policies.replay_rule: function {shown(function)} is a "
            f"{type(function).__name__}, but a rule is for a subclass of torch.autograd.Function. "
            "Pass the class itself."
        )
    for name, value in (("rebuild", rebuild), ("probe", probe)):
        if not callable(value):
            raise EngineError(
                f"sac_policies.replay_rule: {name} {shown(value)} is a {type(value).__name__}, "
                "but it is called. Pass a function."
            )
    if not isinstance(op, torch._ops.OpOverload):
        raise EngineError(
            f"sac_policies.replay_rule: op {shown(op)} is a {type(op).__name__}, but policies are "
            "asked about one overload of an operator. Pass one as torch.ops.aten.gelu.default."
        )


def _check_place(device: object, dtype: object) -> None:
    if not isinstance(dtype, torch.dtype):
        raise EngineError(
            f"sac_policies.replay_rule: dtype {shown(dtype)} is a {type(dtype).__name__}, but the "
            "rule is tried on tensors of one dtype. Pass one as torch.float32."
        )
    try:
        torch.device(device)  # type: ignore[call-overload]  # anything may come here
    except (RuntimeError, TypeError, ValueError) as error:
        raise EngineError(
            f"sac_policies.replay_rule: device {shown(device)} is not known to torch, but the "
            'rule is tried on one. Pass "cpu", or the device that the function is for.'
        ) from error
