"""The built-in rules. Each refuses invalid values; `_builders.py` has the public functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache

from .._errors import PolicyError, shown
from .._frames import user_line
from ._catalogue import group_named
from ._checked import check_texts, is_count
from ._decisions import Decision
from ._flops import flops_of
from ._matching import Matcher, unmatched_entries
from ._names import NAME_OP
from ._policies import DEPENDS, Answer, Constant, Policy
from ._views import Operator, OpView, RegionSummary, Unmatched, runs_of


@dataclass(frozen=True)
class Always(Policy):
    """The same decision for every call."""

    answer: Decision

    def decide(self, view: OpView) -> Answer:
        """Return the decision."""
        return self.answer

    def constant(self, op: Operator) -> Constant:
        """Return the decision."""
        return self.answer


RECOMPUTE_ALL = Always(Decision.RECOMPUTE)
"""Keeps nothing."""


@dataclass(frozen=True)
class _Entries(Policy):
    """Base of rules that name operators."""

    entries: tuple[str, ...]

    def __post_init__(self) -> None:
        check_texts(self.entries, "operator", where=self._builder)
        for entry in self.entries:
            if entry.startswith("@"):
                group_named(entry, where=self._builder)

    @property
    def _builder(self) -> str:
        """The public function that makes the rule."""
        return "save_every_nth"

    @cached_property
    def _names(self) -> Matcher:
        return Matcher(self.entries)

    def unmatched(self, seen: RegionSummary) -> tuple[str, ...]:
        """Return all entries if none names an operator of the region.

        Lists are often written for several models and devices, so one matching entry is enough.
        """
        found = unmatched_entries(self.entries, map(_plain, seen.ops))
        return found if len(found) == len(self.entries) else ()


@dataclass(frozen=True)
class OpRule(_Entries):
    """One decision for every call of the named operators."""

    answer: Decision

    @property
    def _builder(self) -> str:
        return _BUILDERS[self.answer]

    def decide(self, view: OpView) -> Answer:
        """Return the decision for the named operators."""
        return self.answer if self._names(view.op) else None

    def constant(self, op: Operator) -> Constant:
        """Return the same as `decide`: it reads only the operator."""
        return self.answer if self._names(op) else None

    @property
    def offloads(self) -> bool:
        """Whether the decision is OFFLOAD."""
        return self.answer is Decision.OFFLOAD


_BUILDERS = {
    Decision.SAVE: "save_ops",
    Decision.OFFLOAD: "offload",
    Decision.RECOMPUTE: "recompute_ops",
}


@dataclass(frozen=True)
class EveryNth(_Entries):
    """Save calls `phase`, `phase + n`, ... among all calls of the named operators together."""

    n: int
    phase: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_count(self.n) and is_count(self.phase) and self.phase < self.n):
            raise PolicyError(
                f"sac_policies.save_every_nth: n {shown(self.n)} and phase {shown(self.phase)} "
                "pick no call, but 0 <= phase < n in whole numbers is needed. Use n=2 for the "
                "first of every two."
            )

    def decide(self, view: OpView) -> Answer:
        """Save one call in `n`, recompute the others."""
        if not self._names(view.op):
            return None
        calls = view.region.calls().items()
        number = sum(count for op, count in calls if self._names(_plain(op))) - 1
        return Decision.SAVE if number % self.n == self.phase else Decision.RECOMPUTE

    def constant(self, op: Operator) -> Constant:
        """Return no answer for operators that are not named."""
        return DEPENDS if self._names(op) else None

    def counts(self, op: Operator) -> bool:
        """Whether `op` is one of the named operators, whose calls are counted."""
        return self._names(op)


@dataclass(frozen=True, kw_only=True)
class SourceLocated(Policy):
    """Base of rules that record their line for messages; not part of their value."""

    line: str = field(default_factory=user_line, compare=False, repr=False)

    @property
    def text(self) -> str:
        """Its value and line."""
        return f"{self!r} (written at {self.line})"


@dataclass(frozen=True)
class NameRule(SourceLocated):
    """One decision for tensors with one of these names, given by `checkpoint_name`."""

    labels: tuple[str, ...]
    answer: Decision
    missing_ok: bool = False

    def __post_init__(self) -> None:
        check_texts(self.labels, "name", where="save_named")

    def decide(self, view: OpView) -> Answer:
        """Return the decision for the listed names and globs."""
        if view.op is not NAME_OP or view.label is None:
            return None
        return self.answer if any(fnmatchcase(view.label, each) for each in self.labels) else None

    def constant(self, op: Operator) -> Constant:
        """Return no answer for operators other than the one that names tensors."""
        return DEPENDS if op is NAME_OP else None

    @property
    def reads_names(self) -> bool:
        """True: names decide."""
        return True

    def missing(self, seen: RegionSummary) -> tuple[Unmatched, ...]:
        """List the names that no tensor has."""
        return tuple(
            Unmatched(each, "save_named", "tensor", self.line)
            for each in self.labels
            if not (self.missing_ok or any(fnmatchcase(label, each) for label in seen.labels))
        )


@dataclass(frozen=True)
class Scoped(SourceLocated):
    """`inner`, applied only inside modules whose path matches one of `modules`."""

    inner: Policy
    modules: tuple[str, ...]
    missing_ok: bool = False

    def __post_init__(self) -> None:
        check_texts(self.modules, "module path", where=self._builder)

    @property
    def _builder(self) -> str:
        return "save_modules" if self.inner == Always(Decision.SAVE) else "scoped"

    def decide(self, view: OpView) -> Answer:
        """Call `inner` inside the modules; no answer outside."""
        inside = any(is_inside(view.module, each) for each in self.modules)
        return self.inner.decide(view) if inside else None

    def constant(self, op: Operator) -> Constant:
        """Return no answer if `inner` never has one."""
        return None if self.inner.constant(op) is None else DEPENDS

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The restricted policy."""
        return (self.inner,)

    @property
    def reads_modules(self) -> bool:
        """True: module paths decide."""
        return True

    def missing(self, seen: RegionSummary) -> tuple[Unmatched, ...]:
        """Return globs that match no module, and missing names of `inner`."""
        mine = (
            Unmatched(each, self._builder, "module", self.line)
            for each in self.modules
            if not (self.missing_ok or any(is_inside(path, each) for path in seen.modules))
        )
        return (*mine, *self.inner.missing(seen))


@dataclass(frozen=True)
class SizeRule(Policy):
    """Save outputs whose bytes lie between two bounds, both included."""

    at_least: int
    at_most: int | None

    def __post_init__(self) -> None:
        most = self.at_least if self.at_most is None else self.at_most
        if not (is_count(self.at_least) and is_count(most) and self.at_least <= most):
            raise PolicyError(
                f"sac_policies.save_by_bytes: bounds {shown(self.at_least)} to "
                f"{shown(self.at_most)} bytes hold no size, but 0 <= at_least <= at_most in whole "
                "bytes is needed. Swap or drop one of them, or write parse_size('1 MiB')."
            )

    def decide(self, view: OpView) -> Answer:
        """Compare the output's bytes."""
        fits = self.at_least <= view.out_bytes and (
            self.at_most is None or view.out_bytes <= self.at_most
        )
        return Decision.SAVE if fits else None


@dataclass(frozen=True)
class ShapeRule(Policy):
    """Save outputs of one of these shapes; None matches any size."""

    shapes: tuple[tuple[int | None, ...], ...]

    def __post_init__(self) -> None:
        if not self.shapes:
            raise PolicyError(
                "sac_policies.save_by_shape: no shape is given, but at least one is needed. "
                "Use recompute_all() to keep nothing."
            )
        for shape in self.shapes:
            if not (isinstance(shape, tuple) and all(map(_is_size, shape))):
                raise PolicyError(
                    f"sac_policies.save_by_shape: shape {shown(shape)} is not a shape, but a shape "
                    "is a tuple of whole numbers and None. Write for example (None, 256)."
                )

    def decide(self, view: OpView) -> Answer:
        """Compare the shape of every output tensor."""
        fits = any(_fits(shape, each) for shape in self.shapes for each in view.shapes)
        return Decision.SAVE if fits else None


@dataclass(frozen=True)
class FlopRule(Policy):
    """Save outputs of operators with at least so many floating-point operations."""

    at_least: int

    def __post_init__(self) -> None:
        if not is_count(self.at_least):
            raise PolicyError(
                f"sac_policies.save_by_flops: at_least {shown(self.at_least)} is not a count, but "
                "operators count in whole numbers from 0. Use 1 for every operator that has a "
                "known count."
            )

    def decide(self, view: OpView) -> Answer:
        """Count multiplications and additions of this call."""
        flops = flops_of(view.op, view.args, view.kwargs, view.output)
        return Decision.SAVE if flops >= self.at_least else None


@dataclass(frozen=True)
class Offloaded(Policy):
    """Values that `inner` saves, kept in host memory instead."""

    inner: Policy

    def decide(self, view: OpView) -> Answer:
        """Turn SAVE into OFFLOAD."""
        answer = self.inner.decide(view)
        return Decision.OFFLOAD if answer is Decision.SAVE else answer

    def constant(self, op: Operator) -> Constant:
        """Turn a constant SAVE into OFFLOAD."""
        answer = self.inner.constant(op)
        return Decision.OFFLOAD if answer is Decision.SAVE else answer

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The inner policy."""
        return (self.inner,)

    @property
    def offloads(self) -> bool:
        """True: what `inner` saves is offloaded."""
        return True


@lru_cache(maxsize=4096)
def is_inside(path: str, glob: str) -> bool:
    """Whether a run of components of the dotted `path` matches `glob`.

    Example:
        >>> is_inside("blocks.3.attn.out", "blocks.*.attn")
        True
    """
    return any(fnmatchcase(run, glob) for run in runs_of(path))


def _plain(counted: Operator) -> Operator:
    """Return the operator of a counted call; compiled callables are counted in pairs."""
    return counted[0] if isinstance(counted, tuple) else counted


def _is_size(given: object) -> bool:
    return given is None or is_count(given)


def _fits(shape: tuple[int | None, ...], actual: tuple[int, ...]) -> bool:
    if len(shape) != len(actual):
        return False
    return all(size is None or size == found for size, found in zip(shape, actual, strict=True))
