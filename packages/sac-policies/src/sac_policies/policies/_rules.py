"""The built-in rules; `_builders.py` has the functions that make them."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache

from .._frames import user_line
from ._checked import MAX_ENTRIES, is_count, text_problem
from ._decisions import Decision
from ._flops import flops_of
from ._matching import Matcher, unknown_group, unmatched_entries
from ._names import NAME_OP
from ._policies import DEPENDS, Answer, Constant, Policy, check_extent
from ._views import Operator, OpView, RegionSummary, Unmatched, runs_of


@dataclass(frozen=True)
class Always(Policy):
    """The same decision for every call."""

    answer: Decision

    def decide(self, view: OpView) -> Answer:
        """Give the decision, whatever the call."""
        return self.answer

    def constant(self, op: Operator) -> Constant:
        """Give the decision: no call has another."""
        return self.answer


RECOMPUTE_ALL = Always(Decision.RECOMPUTE)
"""Keeps nothing."""


@dataclass(frozen=True)
class _Entries(Policy):
    """What rules that name operators share."""

    entries: tuple[str, ...]

    @property
    def problem(self) -> str:
        """An entry that names nothing, or too much."""
        return _some(self.entries, "entry") or unknown_group(self.entries)

    @cached_property
    def _names(self) -> Matcher:
        return Matcher(self.entries)

    def unmatched(self, seen: RegionSummary) -> tuple[str, ...]:
        """All entries if none names an operator of the region.

        A list is written for several models and devices, so one entry that ran is enough.
        """
        found = unmatched_entries(self.entries, map(_plain, seen.ops))
        return found if len(found) == len(self.entries) else ()


@dataclass(frozen=True)
class OpRule(_Entries):
    """One decision for every call of the named operators."""

    answer: Decision

    def decide(self, view: OpView) -> Answer:
        """Answer for the operators named."""
        return self.answer if self._names(view.op) else None

    def constant(self, op: Operator) -> Constant:
        """Depends on nothing but the operator."""
        return self.answer if self._names(op) else None


@dataclass(frozen=True)
class EveryNth(_Entries):
    """Save calls `phase`, `phase + n`, ... among all calls of the named operators together."""

    n: int
    phase: int

    @property
    def problem(self) -> str:
        """Numbers that pick no call."""
        picks = is_count(self.n) and is_count(self.phase) and self.phase < self.n
        return super().problem if picks else f"n {self.n} and phase {self.phase} pick no call"

    def decide(self, view: OpView) -> Answer:
        """Save one call in `n`, recompute the others."""
        if not self._names(view.op):
            return None
        calls = view.region.calls().items()
        number = sum(count for op, count in calls if self._names(_plain(op))) - 1
        return Decision.SAVE if number % self.n == self.phase else Decision.RECOMPUTE

    def constant(self, op: Operator) -> Constant:
        """No answer for operators not named."""
        return DEPENDS if self._names(op) else None

    def counts(self, op: Operator) -> bool:
        """Counts the operators named."""
        return self._names(op)


@dataclass(frozen=True, kw_only=True)
class SourceLocated(Policy):
    """A rule that remembers where it was written, for messages; no part of its value."""

    line: str = field(default_factory=user_line, compare=False, repr=False)

    @property
    def text(self) -> str:
        """Its value, and where it was written."""
        return f"{self!r} (written at {self.line})"


@dataclass(frozen=True)
class NameRule(SourceLocated):
    """One decision for tensors that `name` has given one of these names."""

    labels: tuple[str, ...]
    answer: Decision
    missing_ok: bool = False

    @property
    def problem(self) -> str:
        """A name that no tensor can have."""
        return _some(self.labels, "name")

    def decide(self, view: OpView) -> Answer:
        """Answer for the names listed; globs are allowed."""
        if view.op is not NAME_OP or view.label is None:
            return None
        return self.answer if any(fnmatchcase(view.label, each) for each in self.labels) else None

    def constant(self, op: Operator) -> Constant:
        """Names decide; other operators have no answer."""
        return DEPENDS if op is NAME_OP else None

    @property
    def reads_names(self) -> bool:
        """Names decide here, so a region looks for them."""
        return True

    def missing(self, seen: RegionSummary) -> tuple[Unmatched, ...]:
        """Names that no tensor was given."""
        return tuple(
            Unmatched(each, "save_named", "tensor", self.line)
            for each in self.labels
            if not (self.missing_ok or any(fnmatchcase(label, each) for label in seen.labels))
        )


@dataclass(frozen=True)
class Scoped(SourceLocated):
    """`inner`, asked only inside modules whose path matches one of `modules`."""

    inner: Policy
    modules: tuple[str, ...]
    missing_ok: bool = False

    def __post_init__(self) -> None:
        check_extent(self)

    @property
    def problem(self) -> str:
        """A path that no module can have."""
        return _some(self.modules, "module path")

    def decide(self, view: OpView) -> Answer:
        """Ask `inner` inside the modules, nobody outside."""
        inside = any(is_inside(view.module, each) for each in self.modules)
        return self.inner.decide(view) if inside else None

    def constant(self, op: Operator) -> Constant:
        """No answer where `inner` never has one."""
        return None if self.inner.constant(op) is None else DEPENDS

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The policy restricted."""
        return (self.inner,)

    @property
    def reads_modules(self) -> bool:
        """Paths decide here, so a region follows its modules."""
        return True

    def missing(self, seen: RegionSummary) -> tuple[Unmatched, ...]:
        """Globs that match no module, and what `inner` misses."""
        rule = "save_modules" if self.inner == Always(Decision.SAVE) else "scoped"
        mine = (
            Unmatched(each, rule, "module", self.line)
            for each in self.modules
            if not (self.missing_ok or any(is_inside(path, each) for path in seen.modules))
        )
        return (*mine, *self.inner.missing(seen))


@dataclass(frozen=True)
class SizeRule(Policy):
    """Save outputs whose bytes lie between two bounds, both included."""

    at_least: int
    at_most: int | None

    @property
    def problem(self) -> str:
        """Bounds that hold no size."""
        most = self.at_least if self.at_most is None else self.at_most
        holds = is_count(self.at_least) and is_count(most) and self.at_least <= most
        return "" if holds else f"bounds {self.at_least} to {self.at_most} bytes hold no size"

    def decide(self, view: OpView) -> Answer:
        """Compare the output's bytes."""
        fits = self.at_least <= view.out_bytes and (
            self.at_most is None or view.out_bytes <= self.at_most
        )
        return Decision.SAVE if fits else None


@dataclass(frozen=True)
class ShapeRule(Policy):
    """Save outputs of one of these shapes; None stands for any size."""

    shapes: tuple[tuple[int | None, ...], ...]

    @property
    def problem(self) -> str:
        """A shape that no tensor has."""
        if not self.shapes or len(self.shapes) > MAX_ENTRIES:
            return f"it lists {len(self.shapes)} shapes"
        wrong = (each for each in self.shapes if not all(map(is_size, each)))
        return next((f"shape {each} is not a shape" for each in wrong), "")

    def decide(self, view: OpView) -> Answer:
        """Compare the shape of every output tensor."""
        fits = any(_fits(shape, each) for shape in self.shapes for each in view.shapes)
        return Decision.SAVE if fits else None


@dataclass(frozen=True)
class FlopRule(Policy):
    """Save outputs of operators that do at least so much arithmetic."""

    at_least: int

    @property
    def problem(self) -> str:
        """A number that is no count."""
        return "" if is_count(self.at_least) else f"at_least {self.at_least} is not a count"

    def decide(self, view: OpView) -> Answer:
        """Count multiplications and additions of this call."""
        flops = flops_of(view.op, view.args, view.kwargs, view.output)
        return Decision.SAVE if flops >= self.at_least else None


@dataclass(frozen=True)
class Offloaded(Policy):
    """What `inner` saves, kept in host memory instead."""

    inner: Policy

    def __post_init__(self) -> None:
        check_extent(self)

    def decide(self, view: OpView) -> Answer:
        """Turn SAVE into OFFLOAD."""
        return _moved(self.inner.decide(view))

    def constant(self, op: Operator) -> Constant:
        """Constant where `inner` is."""
        return _constantly_moved(self.inner.constant(op))

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The policy whose saves are moved."""
        return (self.inner,)

    @property
    def offloads(self) -> bool:
        """What `inner` saves is offloaded."""
        return True


@lru_cache(maxsize=4096)
def is_inside(path: str, glob: str) -> bool:
    """Whether a run of components of the dotted `path` matches `glob`.

    Example:
        >>> is_inside("blocks.3.attn.out", "blocks.*.attn")
        True
    """
    return any(fnmatchcase(run, glob) for run in runs_of(path))


def _some(texts: tuple[str, ...], what: str) -> str:
    return text_problem(texts, what) if texts else f"it lists no {what}"


def _plain(counted: Operator) -> Operator:
    """Return the operator of a counted call; compiled callables are counted in pairs."""
    return counted[0] if isinstance(counted, tuple) else counted


def is_size(given: object) -> bool:
    """Whether this stands for a size in a shape: a count, or None for any."""
    return given is None or is_count(given)


def _fits(shape: tuple[int | None, ...], actual: tuple[int, ...]) -> bool:
    if len(shape) != len(actual):
        return False
    return all(size is None or size == found for size, found in zip(shape, actual, strict=True))


def _constantly_moved(answer: Constant) -> Constant:
    return DEPENDS if answer is DEPENDS else _moved(answer)


def _moved(answer: Answer) -> Answer:
    return Decision.OFFLOAD if answer is Decision.SAVE else answer
