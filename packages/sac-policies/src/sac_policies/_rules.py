"""Torch: the built-in rules; `_builders.py` has the functions that make them."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from ._decisions import Decision
from ._flops import flops_of
from ._matching import matches, matches_any
from ._names import NAME_OP
from ._policies import DEPENDS, Answer, Constant, Policy, Written
from ._views import Operator, OpView, Seen, Unmatched, runs_of


@dataclass(frozen=True)
class Always(Policy):
    """The same decision for every call."""

    answer: Decision

    def decide(self, view: OpView) -> Answer:
        """Answer."""
        return self.answer

    def constant(self, op: Operator) -> Constant:
        """Answer."""
        return self.answer


@dataclass(frozen=True)
class OpRule(Policy):
    """One decision for every call of the named operators."""

    entries: tuple[str, ...]
    answer: Decision

    def decide(self, view: OpView) -> Answer:
        """Answer for the operators named."""
        return self.answer if matches_any(self.entries, view.op) else None

    def constant(self, op: Operator) -> Constant:
        """Depends on nothing but the operator."""
        return self.answer if matches_any(self.entries, op) else None

    def unmatched(self, seen: Seen) -> tuple[str, ...]:
        """Entries that name no operator of the region."""
        return _unmatched_ops(self.entries, seen)


@dataclass(frozen=True)
class EveryNth(Policy):
    """Save calls `phase`, `phase + n`, ... among all calls of the named operators together."""

    entries: tuple[str, ...]
    n: int
    phase: int

    def decide(self, view: OpView) -> Answer:
        """Save one call in `n`, recompute the others."""
        if not matches_any(self.entries, view.op):
            return None
        calls = view.region.calls().items()
        number = sum(count for op, count in calls if matches_any(self.entries, _plain(op))) - 1
        return Decision.SAVE if number % self.n == self.phase else Decision.RECOMPUTE

    def constant(self, op: Operator) -> Constant:
        """No answer for operators not named."""
        return DEPENDS if matches_any(self.entries, op) else None

    def counts(self, op: Operator) -> bool:
        """Counts the operators named."""
        return matches_any(self.entries, op)

    def unmatched(self, seen: Seen) -> tuple[str, ...]:
        """Entries that name no operator of the region."""
        return _unmatched_ops(self.entries, seen)


@dataclass(frozen=True)
class NameRule(Written):
    """One decision for tensors that `name` has given one of these names."""

    labels: tuple[str, ...]
    answer: Decision
    missing_ok: bool = False

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
        """Reads them."""
        return True

    def missing(self, seen: Seen) -> tuple[Unmatched, ...]:
        """Names that no tensor was given."""
        return tuple(
            Unmatched(each, "save_named", "tensor", self.line)
            for each in self.labels
            if not (self.missing_ok or any(fnmatchcase(label, each) for label in seen.labels))
        )


@dataclass(frozen=True)
class Scoped(Written):
    """`inner`, asked only inside modules whose path matches one of `modules`."""

    inner: Policy
    modules: tuple[str, ...]
    missing_ok: bool = False

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
        """Reads them."""
        return True

    def missing(self, seen: Seen) -> tuple[Unmatched, ...]:
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

    def decide(self, view: OpView) -> Answer:
        """Compare the shape of every output tensor."""
        fits = any(_fits(shape, each) for shape in self.shapes for each in view.shapes)
        return Decision.SAVE if fits else None


@dataclass(frozen=True)
class FlopRule(Policy):
    """Save outputs of operators that do at least so much arithmetic."""

    at_least: int

    def decide(self, view: OpView) -> Answer:
        """Count multiplications and additions of this call."""
        flops = flops_of(view.op, view.args, view.kwargs, view.output)
        return Decision.SAVE if flops >= self.at_least else None


@dataclass(frozen=True)
class Offloaded(Policy):
    """What `inner` saves, kept in host memory instead."""

    inner: Policy

    def decide(self, view: OpView) -> Answer:
        """Turn SAVE into OFFLOAD."""
        return _moved(self.inner.decide(view))

    def constant(self, op: Operator) -> Constant:
        """Constant where `inner` is."""
        answer = self.inner.constant(op)
        return DEPENDS if answer is DEPENDS else _moved(answer)

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The policy whose saves are moved."""
        return (self.inner,)

    @property
    def offloads(self) -> bool:
        """Always."""
        return True


@lru_cache(maxsize=4096)
def is_inside(path: str, glob: str) -> bool:
    """Whether a run of components of the dotted `path` matches `glob`.

    Example:
        >>> is_inside("blocks.3.attn.out", "blocks.*.attn")
        True
    """
    return any(fnmatchcase(run, glob) for run in runs_of(path))


def _unmatched_ops(entries: tuple[str, ...], seen: Seen) -> tuple[str, ...]:
    ops = [_plain(op) for op in seen.ops]
    return tuple(each for each in entries if not any(matches(each, op) for op in ops))


def _plain(counted: Operator) -> Operator:
    """Return the operator of a counted call; compiled callables are counted in pairs."""
    return counted[0] if isinstance(counted, tuple) else counted


def _fits(shape: tuple[int | None, ...], actual: tuple[int, ...]) -> bool:
    if len(shape) != len(actual):
        return False
    return all(size is None or size == found for size, found in zip(shape, actual, strict=True))


def _moved(answer: Answer) -> Answer:
    return Decision.OFFLOAD if answer is Decision.SAVE else answer
