"""Edge: runs a region once, forward and backward, and tells what its policy did and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ._decisions import Decision
from ._flops import flops_of
from ._frames import user_line
from ._functions import PolicyFunction, as_policy
from ._modules import root_of
from ._policies import Answer, Policy
from ._torch_compat import storage_key
from ._views import Operator, OpView, Seen, Unmatched
from .engines._contexts import contexts
from .engines._explained import SavedTensor, explain
from .engines._recipe import refusal
from .engines._regions import Region


@dataclass(frozen=True)
class Row:
    """One operator call and what was decided for it.

    Attributes:
        op: operator name.
        index: number among the calls of the operator.
        decision: what happens to its output.
        rule: the rule that decided, as its repr; "" where none spoke.
        out_bytes: bytes of its output.
        flops: floating point operations of the call.
        module: path of the module that ran it; "" outside of policies that name modules.
        label: name given to the tensor, for the rows of `name`.
        line: the user's line that ran it.
        read: whether backward read the kept value; None where nothing was kept.
    """

    op: str
    index: int
    decision: Decision
    rule: str
    out_bytes: int
    flops: int
    module: str
    label: str | None
    line: str
    read: bool | None = None


@dataclass(frozen=True)
class Report:
    """What a policy does to one region.

    Attributes:
        rows: operator calls in forward order.
        held_bytes: bytes that the kept values hold at the end of the forward, shared storage
            counted once.
        saved: what autograd saves under the recipe engine, in order, and why it is kept where
            it is; empty where that engine cannot follow the policy.
    """

    rows: tuple[Row, ...]
    held_bytes: int
    saved: tuple[SavedTensor, ...] = ()

    @property
    def kept(self) -> tuple[Row, ...]:
        """Rows whose output is saved or offloaded."""
        return tuple(row for row in self.rows if row.decision.keeps)

    @property
    def unread(self) -> tuple[Row, ...]:
        """Rows whose output was kept for nothing."""
        return tuple(row for row in self.rows if row.read is False)

    @property
    def recomputed_flops(self) -> int:
        """Floating point operations of everything that is not kept."""
        return sum(row.flops for row in self.rows if not row.decision.keeps)

    @property
    def decisions(self) -> tuple[tuple[str, int, Decision], ...]:
        """(operator, number, decision) of every call, in order; comparable between engines."""
        return tuple((row.op, row.index, row.decision) for row in self.rows)

    def differs_from(self, other: Report) -> tuple[tuple[Row, Row | None], ...]:
        """Rows decided otherwise in `other`, with their counterparts there."""
        theirs = {(row.op, row.index): row for row in other.rows}
        pairs = ((row, theirs.get((row.op, row.index))) for row in self.rows)
        return tuple(
            (row, twin) for row, twin in pairs if twin is None or twin.decision != row.decision
        )

    def __str__(self) -> str:
        lines = [_line(row) for row in self.rows]
        lines.append(f"{self.held_bytes:,} bytes held, {len(self.unread)} unread")
        return "\n".join([*lines, *_recipe_lines(self.saved)])


def _line(row: Row) -> str:
    name = f"{row.op}[{row.index}]" + (f" {row.label!r}" if row.label else "")
    unread = " UNREAD" if row.read is False else ""
    return f"{row.decision.value:9} {row.out_bytes:>12,} B  {name:40} {row.rule}{unread}"


def _recipe_lines(saved: tuple[SavedTensor, ...]) -> Iterator[str]:
    """Yield a line for what the recipe engine replays, and one for each reason to keep."""
    if not saved:
        return
    replayed = sum(each.replayed for each in saved)
    yield f"recipe engine: {replayed} of {len(saved)} saved tensors replayed"
    for why, count in Counter(each.why for each in saved if each.why).items():
        yield f"  {count} kept: {why}"


@dataclass(frozen=True, eq=False)
class _Recorded(Policy):
    """Another policy, with everything it is asked and answers written down."""

    inner: Policy
    rows: list[Row] = field(default_factory=list)

    def decide(self, view: OpView) -> Answer:
        answer = self.inner.decide(view)
        self.rows.append(_row(self.inner, view, answer))
        return answer

    def counts(self, op: Operator) -> bool:
        del op
        return True

    @property
    def parts(self) -> tuple[Policy, ...]:
        return (self.inner,)

    @property
    def reads_names(self) -> bool:
        """Always, so that namings have rows whatever the policy reads."""
        return True

    def unmatched(self, seen: Seen) -> tuple[str, ...]:
        del seen
        return ()

    def missing(self, seen: Seen) -> tuple[Unmatched, ...]:
        del seen
        return ()


def _row(policy: Policy, view: OpView, answer: Answer) -> Row:
    return Row(
        op=str(view.op),
        index=view.index,
        decision=answer or Decision.RECOMPUTE,
        rule="" if answer is None else repr(_speaker(policy, view, answer)),
        out_bytes=view.out_bytes,
        flops=flops_of(view.op, view.args, view.kwargs, view.output),
        module=view.module,
        label=view.label,
        line=user_line(),
    )


def _speaker(policy: Policy, view: OpView, answer: Answer) -> Policy:
    """Return the innermost rule that gives the answer by itself."""
    for part in policy.parts:
        if part.decide(view) is answer:
            return _speaker(part, view, answer)
    return policy


def report(
    function: Callable[..., Any],
    *args: Any,
    policy: Policy | PolicyFunction | list[Any],
    **kwargs: Any,
) -> Report:
    """Run `function`, forward and backward, and tell what `policy` keeps, where and why.

    Runs one more forward to tell what the recipe engine keeps, where that can follow the
    policy. Leaves gradients and the random state as they were. Module buffers change as in
    any forward.

    Args:
        function: what would be checkpointed.
        args: its positional arguments.
        policy: as for `checkpoint`.
        kwargs: its keyword arguments.

    Example:
        >>> from sac_policies import save_ops
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> [row.op for row in report(lambda a: (a @ a).sin(), x, policy=save_ops("aten.mm")).kept]
        ['aten.mm.default']
    """
    given = as_policy(policy)
    recorded = _Recorded(given)
    forward, recompute = contexts(recorded, root=root_of(function))
    region = forward.region
    with torch.random.fork_rng(devices=[]):
        out = torch_checkpoint(
            function,
            *args,
            use_reentrant=False,
            context_fn=lambda: (forward, recompute),
            **kwargs,
        )
        held_bytes = _distinct_bytes(region)
        kept = set(region.kept)
        _backward(out)
    read = {(str(op), index): (op, index) not in region.unread for op, index in kept}
    rows = tuple(replace(row, read=read.get((row.op, row.index))) for row in recorded.rows)
    with torch.random.fork_rng(devices=[]):
        saved = () if refusal(given) else explain(function, args, kwargs, given)
    return Report(rows, held_bytes, saved)


def _distinct_bytes(region: Region) -> int:
    storages = {
        storage_key(tensor): tensor.untyped_storage().nbytes()
        for kept in region.kept.values()
        for tensor in kept.resident()
    }
    return sum(storages.values())


def _backward(out: Any) -> None:
    """Run backward from every output, leaving no gradient behind."""
    roots = [each for each in _tensors(out) if each.requires_grad]
    leaves = list(_leaves([root.grad_fn for root in roots]))
    if leaves:
        ones = [torch.ones_like(root) for root in roots]
        torch.autograd.grad(roots, leaves, ones, allow_unused=True)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _leaves(nodes: list[Any]) -> Iterator[torch.Tensor]:
    """Tensors that the graph behind `nodes` would accumulate gradients into."""
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes.extend(each for each, _ in node.next_functions)
