"""A policy's view of one operator call, and the counts of its region."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch

from .._torch_compat._nested import shape_of

Operator = Any  # an OpOverload or a HigherOrderOperator

_NO_KWARGS: Mapping[str, Any] = MappingProxyType({})


class RegionState:
    """Number of calls of each operator in one forward of one region.

    A new one is made for every forward, so policies have no counters.
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: dict[Operator, int] = {}

    def enter(self, op: Operator) -> int:
        """Count a call of `op`; return its index among the calls of `op`, from 0."""
        index = self._calls.get(op, 0)
        self._calls[op] = index + 1
        return index

    def calls(self) -> Mapping[Operator, int]:
        """Return calls so far of each counted operator, including the current one."""
        return self._calls


@dataclass(frozen=True, slots=True, eq=False)
class OpView:
    """One operator call as policies see it, after it ran.

    Also replaces torch's SelectiveCheckpointContext, the first argument of a
    plain policy function.

    Attributes:
        op: the operator overload.
        index: number of this call among the calls of `op` in the region, from 0.
        output: result of the operator (real or fake tensors), None if unknown.
        args: positional arguments.
        kwargs: keyword arguments.
        module: path of the innermost module that ran the operator, "" for the region itself.
        label: the name given by `sac_policies.checkpoint_name`, None otherwise.
        region: counts of the region so far, including this call.
    """

    op: Operator
    index: int
    output: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=lambda: _NO_KWARGS)
    module: str = ""
    label: str | None = None
    region: RegionState = field(default_factory=RegionState)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Output tensors, in the operator's order."""
        return tuple(each for each in _flat(self.output) if isinstance(each, torch.Tensor))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each output tensor; for a nested one with -1 where its parts differ."""
        return tuple(map(shape_of, self.tensors))

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtype of each output tensor."""
        return tuple(each.dtype for each in self.tensors)

    @property
    def out_bytes(self) -> int:
        """Bytes of all output tensors together."""
        return sum(each.numel() * each.element_size() for each in self.tensors)

    @property
    def is_recompute(self) -> bool:
        """Always False: policies are called in the forward only."""
        return False

    @property
    def op_output(self) -> Any:
        """The output, under the name in torch's context."""
        return self.output


@dataclass(frozen=True, slots=True)
class RegionSummary:
    """What ran in a region so far, to report entries of a policy that match nothing.

    Attributes:
        ops: operators, and the number of calls of each counted one.
        labels: names given to tensors.
        modules: paths of modules in the region, whether they ran or not.
        kept: operators of which a value was kept.
    """

    ops: Mapping[Operator, int]
    labels: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()
    kept: frozenset[Operator] = frozenset()


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A name of a policy that its regions do not have.

    Attributes:
        entry: the name.
        rule: the public function that made the rule.
        kind: kind of the name.
        line: line of the rule.
    """

    entry: str
    rule: str
    kind: Literal["module", "tensor"]
    line: str

    def known(self, seen: RegionSummary) -> frozenset[str]:
        """Existing names of this kind."""
        if self.kind == "tensor":
            return seen.labels
        return frozenset(run for path in seen.modules for run in runs_of(path) if run)


def runs_of(path: str) -> Iterator[str]:
    """Yield every run of components of a dotted path.

    Example:
        >>> list(runs_of("a.b"))
        ['a', 'a.b', 'b']
    """
    names = path.split(".")
    for start in range(len(names)):
        for stop in range(start + 1, len(names) + 1):
            yield ".".join(names[start:stop])


def _flat(value: Any) -> tuple[Any, ...]:
    if isinstance(value, (tuple, list)):
        return tuple(leaf for each in value for leaf in _flat(each))
    return (value,)
