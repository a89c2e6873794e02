"""A policy's view of one operator call, and what ran in a region."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

Operator = Any  # an OpOverload or a HigherOrderOperator

_NO_KWARGS: Mapping[str, Any] = MappingProxyType({})


class OpView(NamedTuple):
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
    """

    op: Operator
    index: int  # type: ignore[assignment]  # a method of tuples
    output: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = _NO_KWARGS
    module: str = ""
    label: str | None = None

    @property
    def is_recompute(self) -> bool:
        """Always False: policies are called in the forward only."""
        return False

    @property
    def op_output(self) -> Any:
        """The output, under the name in torch's context."""
        return self.output

    @property
    def out_bytes(self) -> int:
        """Bytes of all output tensors together."""
        return _bytes(self.output)


class RegionSummary(NamedTuple):
    """What ran in a region so far, to report entries of a policy that match nothing.

    Attributes:
        ops: operators, and the number of calls of each counted one.
        labels: names given to tensors.
        modules: paths of modules in the region, whether they ran or not.
        kept: whether the policy kept a value by an answer to one call.
    """

    ops: Mapping[Operator, int]
    labels: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()
    kept: bool = False


class Missing(NamedTuple):
    """A name of a policy that its regions do not have; `kind` is "module" or "tensor"."""

    kind: str
    entry: str


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


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (tuple, list)) else 0
