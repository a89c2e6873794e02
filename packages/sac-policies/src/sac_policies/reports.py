"""Run a region's forward once, and report from the tape what its policy keeps, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ._checkpoint import check_call, own_arguments
from ._errors import EngineError
from ._frames import user_line
from ._torch_compat import is_traced
from .eager._moved import OffloadStats
from .eager._reading import Reading
from .policies._catalogue import ATTENTION, CONVOLUTIONS, MATMULS, Group
from .policies._decisions import Answer, Decision
from .policies._flops import flops_of
from .policies._functions import PolicyLike, as_policy
from .policies._policies import Policy
from .policies._views import OpView
from .trials._batches import tensors_behind
from .trials._rollback import Rollback

__all__ = ["OffloadStats", "Report", "Row", "report"]


@dataclass(frozen=True)
class Row:
    """One operator call and its decision.

    Attributes:
        op: operator name.
        index: number among the calls of the operator.
        decision: what happens to its output.
        rule: the deciding rule, as its repr; "" if none decided.
        out_bytes: bytes of its output.
        flops: floating-point operations of the call.
        module: path of the module that ran it; "" for policies that do not read modules.
        label: name given to the tensor, for the rows of `checkpoint_name`.
        line: the user's line that ran it.
        read: whether backward needs the value that the policy keeps; None if the policy does not
            keep it. A value that backward does not need is not held.
        held_bytes: bytes of the call's results held on the device; a shared storage counts with
            the call that made it.
        why: why it is held although the policy recomputes it; "" otherwise.
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
    held_bytes: int = 0
    why: str = ""


@dataclass(frozen=True)
class Report:
    """The effect of a policy on one region.

    Attributes:
        rows: operator calls in forward order; calls of a nested region are decided by its policy.
        held_bytes: bytes made by the region that are held on the device between forward and
            backward, shared storage counted once: the sum over `rows`. Parameters and inputs
            do not count.
    """

    rows: tuple[Row, ...]
    held_bytes: int

    @property
    def kept(self) -> tuple[Row, ...]:
        """Rows whose output the policy saves or offloads."""
        return tuple(row for row in self.rows if row.decision.keeps)

    @property
    def kept_anyway(self) -> tuple[Row, ...]:
        """Rows that the policy recomputes but that are held; their `why` has the reason."""
        return tuple(row for row in self.rows if row.why)

    @property
    def unread(self) -> tuple[Row, ...]:
        """Rows that the policy keeps and backward does not need; they are not held."""
        return tuple(row for row in self.rows if row.read is False)

    @property
    def recomputed_flops(self) -> int:
        """Floating-point operations of all results that are not kept.

        Backward repeats those that saved tensors are computed from.
        """
        return sum(row.flops for row in self.rows if not (row.decision.keeps or row.why))

    def __str__(self) -> str:
        """Summarise: saved, offloaded, otherwise held and recomputed operators."""
        lines = [
            *_summed("saved", self._with(Decision.SAVE)),
            *_summed("offloaded", self._with(Decision.OFFLOAD)),
        ]
        for why, count in Counter(row.why for row in self.kept_anyway).items():
            rows = [row for row in self.kept_anyway if row.why == why]
            names = ", ".join(sorted({_short(row.op) for row in rows}))
            lines.append(f"{count} kept anyway, {_size(rows)} ({names}): {why}")
        if self.unread:
            names = ", ".join(sorted({_short(row.op) for row in self.unread}))
            lines.append(f"{_counted(len(self.unread), names)} not held: backward does not need it")
        again = sum(not (row.decision.keeps or row.why) for row in self.rows)
        lines.append(f"{_counted(again, 'operator')} recomputed")
        return "\n".join([*lines, f"{_bytes(self.held_bytes)} held in all"])

    def _with(self, decision: Decision) -> list[Row]:
        return [row for row in self.rows if row.decision is decision and row.read]


_GROUPS = ((MATMULS, "matmul"), (ATTENTION, "attention"), (CONVOLUTIONS, "convolution"))


def _summed(verb: str, rows: list[Row]) -> list[str]:
    """Format a line for each kind of operator that was saved or offloaded."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kinds.setdefault(_kind(row), []).append(row)
    offloads = verb == "offloaded"
    return [
        f"{_counted(len(each), kind)} {verb}, {_size(each, offloads)}"
        for kind, each in kinds.items()
    ]


def _kind(row: Row) -> str:
    if row.label:
        return f"{row.label!r}"
    packet = row.op.rpartition(".")[0]
    return next((word for group, word in _GROUPS if _names(group, packet)), _short(row.op))


def _names(group: Group, packet: str) -> bool:
    return packet in group.names


def _short(op: str) -> str:
    return op.split(".")[1] if op.count(".") else op


def _counted(count: int, word: str) -> str:
    plural = count != 1 and word in ("matmul", "convolution", "operator")
    return f"{count} {word}{'s' if plural else ''}"


def _size(rows: Iterable[Row], whole: bool = False) -> str:
    return _bytes(sum(row.out_bytes if whole else row.held_bytes for row in rows))


def _bytes(count: int) -> str:
    if count < 1024:
        return f"{count} bytes"
    unit, size = ("MiB", count / 2**20) if count >= 2**20 else ("KiB", count / 2**10)
    return f"{size:,.1f} {unit}"


def _row(policy: Policy, view: OpView, answer: Answer, *_: Any) -> Row:
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
    """Return the innermost rule that alone gives the answer."""
    for part in policy.parts:
        if part.decide(view) is answer:
            return _speaker(part, view, answer)
    return policy


def report(function: Callable[..., Any], *args: Any, policy: PolicyLike, **kwargs: Any) -> Report:
    """Run the forward of `function` once and report what `policy` keeps, and why.

    The forward leaves no trace: buffers, attributes of modules, arguments and random numbers are
    restored.

    Args:
        function: the function to checkpoint.
        args: its positional arguments.
        policy: as for `checkpoint`.
        kwargs: torch's options and keyword arguments of `function`, as for `checkpoint`.

    Raises:
        PolicyError: `policy` is invalid, or names modules although `function` has none.
        EngineError: an option is refused, gradients are off, or the code is being compiled.

    Example:
        >>> from sac_policies import save_ops
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> result = report(lambda a: (a @ a).sin(), x, policy=save_ops("aten.mm"))
        >>> print(result)
        1 matmul saved, 16 bytes
        1 operator recomputed
        16 bytes held in all
    """
    wanted = as_policy(policy)
    check_call(function, kwargs, where="report")
    if is_traced() or not torch.is_grad_enabled():
        raise EngineError(
            "sac_policies.report: gradients are off or the code is being compiled, but a report "
            "reads what an eager forward saves for backward. Call it outside of both."
        )
    reading = Reading(wanted, _row, is_full=True)
    own = own_arguments(kwargs)
    given = (*args, *own.values())
    rollback = Rollback(function, *given, tensors=tensors_behind(given))
    with rollback.entered(), rollback.watching():
        tape, out = reading.read(function, args, own)
    held = tape.held_bytes()
    del out
    rows = []
    for at, row in enumerate(reading.calls):
        size, keeps = held.get(at, 0), row.decision.keeps
        read = (size > 0 or at in reading.moved) if keeps else None
        why = reading.whys[at] if size and not keeps else ""
        rows.append(replace(row, read=read, held_bytes=size, why=why))
    return Report(tuple(rows), sum(held.values()))
