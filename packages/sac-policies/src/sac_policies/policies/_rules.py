"""The built-in rules, each after the public function that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from .._errors import PolicyError, shown
from ._decisions import Answer, Decision
from ._flops import flops_of
from ._matching import OpEntry, entry_of, is_named, unmatched_entries
from ._names import NAME_OP
from ._policies import DEPENDS, OFFLOADED, Constant, Policy, Replaced, check_policy
from ._views import Missing, Operator, OpView, RegionSummary, runs_of


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


SAVE_ALL, RECOMPUTE_ALL = Always(Decision.SAVE), Always(Decision.RECOMPUTE)


def save_all() -> Policy:
    """Save the output of every operator."""
    return SAVE_ALL


def recompute_all() -> Policy:
    """Recompute everything: full checkpointing."""
    return RECOMPUTE_ALL


@dataclass(frozen=True)
class OpRule(Policy):
    """One decision for every call of the named operators."""

    entries: tuple[str, ...]
    answer: Decision

    def decide(self, view: OpView) -> Answer:
        """Return the decision for the named operators."""
        return self.answer if is_named(self.entries, view.op) else None

    def constant(self, op: Operator) -> Constant:
        """Return the same as `decide`: it reads only the operator."""
        return self.answer if is_named(self.entries, op) else None

    @property
    def offloads(self) -> bool:
        """Whether the decision is OFFLOAD."""
        return self.answer is Decision.OFFLOAD

    def unmatched(self, seen: RegionSummary) -> tuple[str, ...]:
        """Return all entries if none names an operator of the region."""
        return unmatched_entries(self.entries, seen.ops)


def save_ops(*ops: OpEntry) -> Policy:
    """Save every output of the named operators.

    Args:
        ops: overloads, packets, names ("aten.mm", "ns::op"), globs or catalogue groups.

    Raises:
        PolicyError: no entry, or a name without wildcard that no operator has.

    Example:
        >>> save_ops("aten.mm", "aten._scaled_dot_product_*").entries
        ('aten.mm', 'aten._scaled_dot_product_*')
    """
    return OpRule(_entries(ops, "save_ops"), Decision.SAVE)


def recompute_ops(*ops: OpEntry) -> Policy:
    """Recompute every output of the named operators, unless an earlier rule decides.

    Example:
        >>> recompute_ops("aten.max").answer.value
        'recompute'
    """
    return OpRule(_entries(ops, "recompute_ops"), Decision.RECOMPUTE)


def offload(*what: OpEntry | Policy) -> Policy:
    """Keep results of these operators, or the values that a policy saves, in host memory.

    Args:
        what: operators as for `save_ops`, or one policy.

    Example:
        >>> offload("aten.mm").answer.value
        'offload'
        >>> policy = offload(save_by_bytes(at_least=2**20))
    """
    if len(what) == 1 and isinstance(what[0], Policy):
        return Replaced(what[0], OFFLOADED)
    return OpRule(_entries(what, "offload"), Decision.OFFLOAD)


@dataclass(frozen=True)
class EveryNth(Policy):
    """Save calls `phase`, `phase + n`, ... of each named operator."""

    entries: tuple[str, ...]
    n: int
    phase: int

    def decide(self, view: OpView) -> Answer:
        """Save one call in `n`, recompute the others."""
        if not is_named(self.entries, view.op):
            return None
        return Decision.SAVE if view.index % self.n == self.phase else Decision.RECOMPUTE

    def constant(self, op: Operator) -> Constant:
        """Return no answer for operators that are not named."""
        return DEPENDS if is_named(self.entries, op) else None

    def unmatched(self, seen: RegionSummary) -> tuple[str, ...]:
        """Return all entries if none names an operator of the region."""
        return unmatched_entries(self.entries, seen.ops)


def save_every_nth(*ops: OpEntry, n: int, phase: int = 0) -> Policy:
    """Save every n-th call of each named operator, counted from 0 in each forward.

    Args:
        ops: as for `save_ops`.
        n: distance between saved calls; at least 1.
        phase: number of the first saved call; 0 <= phase < n.

    Example:
        >>> save_every_nth("aten.mm", n=2).phase
        0
    """
    if not (is_count(n) and is_count(phase) and phase < n):
        raise PolicyError(
            f"sac_policies.save_every_nth: n {shown(n)} and phase {shown(phase)} pick no call, but "
            "0 <= phase < n in whole numbers is needed. Use n=2 for the first of every two."
        )
    return EveryNth(_entries(ops, "save_every_nth"), n, phase)


@dataclass(frozen=True)
class NameRule(Policy):
    """Save tensors with one of these names, given by `checkpoint_name`."""

    labels: tuple[str, ...]
    missing_ok: bool = False

    def decide(self, view: OpView) -> Answer:
        """Save tensors with a listed name."""
        if view.op is not NAME_OP or view.label is None:
            return None
        is_listed = any(fnmatchcase(view.label, each) for each in self.labels)
        return Decision.SAVE if is_listed else None

    def constant(self, op: Operator) -> Constant:
        """Return no answer for operators other than the one that names tensors."""
        return DEPENDS if op is NAME_OP else None

    @property
    def reads_names(self) -> bool:
        """True: names decide."""
        return True

    def missing(self, seen: RegionSummary) -> tuple[Missing, ...]:
        """List the names that no tensor has."""
        return tuple(
            Missing("tensor", each)
            for each in self.labels
            if not (self.missing_ok or any(fnmatchcase(label, each) for label in seen.labels))
        )


def save_named(*labels: str, missing_ok: bool = False) -> Policy:
    """Save tensors with one of these names, given by `checkpoint_name`; globs are allowed.

    Args:
        labels: names, or globs over names.
        missing_ok: accept names that no tensor has. Otherwise the first backward raises
            `UnmatchedNameError` for a name that no region of its forward had.

    Example:
        >>> save_named("attn_*").labels
        ('attn_*',)
    """
    _check_texts(labels, "name", where="save_named")
    return NameRule(labels, missing_ok)


@dataclass(frozen=True)
class Scoped(Policy):
    """`inner`, applied only inside modules whose path matches one of `modules`."""

    inner: Policy
    modules: tuple[str, ...]
    missing_ok: bool = False

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

    def missing(self, seen: RegionSummary) -> tuple[Missing, ...]:
        """Return globs that match no module, and missing names of `inner`."""
        mine = (
            Missing("module", each)
            for each in self.modules
            if not (self.missing_ok or any(is_inside(path, each) for path in seen.modules))
        )
        return (*mine, *self.inner.missing(seen))


def save_modules(*paths: str, missing_ok: bool = False) -> Policy:
    """Save every output made inside modules whose path matches; arguments as for `scoped`.

    Example:
        >>> save_modules("attn").modules
        ('attn',)
    """
    _check_texts(paths, "module path", where="save_modules")
    return Scoped(SAVE_ALL, paths, missing_ok)


def scoped(policy: Policy, *paths: str, missing_ok: bool = False) -> Policy:
    """Apply `policy` only inside some modules.

    Args:
        policy: any policy.
        paths: globs over module paths. A glob matches a run of path components: "attn"
            matches inside "blocks.3.attn.out" and inside "attn". Paths start below the module
            that is checkpointed.
        missing_ok: accept paths of no module, as on ranks that hold other parts of a model.
            Otherwise the first backward raises `UnmatchedNameError` for a path that no region
            of its forward had.

    Example:
        >>> scoped(save_ops("aten.mm"), "attn", "blocks.0.*").modules
        ('attn', 'blocks.0.*')
    """
    check_policy(policy, where="scoped")
    _check_texts(paths, "module path", where="scoped")
    return Scoped(policy, paths, missing_ok)


@dataclass(frozen=True)
class SizeRule(Policy):
    """Save outputs whose bytes lie between two bounds, both included."""

    at_least: int
    at_most: int | None

    def decide(self, view: OpView) -> Answer:
        """Compare the output's bytes."""
        size = view.out_bytes
        fits = self.at_least <= size and (self.at_most is None or size <= self.at_most)
        return Decision.SAVE if fits else None


def save_by_bytes(*, at_least: int = 0, at_most: int | None = None) -> Policy:
    """Save outputs of `at_least` to `at_most` bytes.

    Example:
        >>> save_by_bytes(at_most=4096).at_most
        4096
    """
    most = at_least if at_most is None else at_most
    if not (is_count(at_least) and is_count(most) and at_least <= most):
        raise PolicyError(
            f"sac_policies.save_by_bytes: bounds {shown(at_least)} to {shown(at_most)} bytes hold "
            "no size, but 0 <= at_least <= at_most in whole bytes is needed. Swap or drop one of "
            "them, or write parse_size('1 MiB')."
        )
    return SizeRule(at_least, at_most)


@dataclass(frozen=True)
class FlopRule(Policy):
    """Save outputs of operators with at least so many floating-point operations."""

    at_least: int

    def decide(self, view: OpView) -> Answer:
        """Count multiplications and additions of this call."""
        flops = flops_of(view.op, view.args, view.kwargs, view.output)
        return Decision.SAVE if flops >= self.at_least else None


def save_by_flops(*, at_least: int) -> Policy:
    """Save outputs of operators that do `at_least` floating point operations.

    Example:
        >>> save_by_flops(at_least=10**9).at_least
        1000000000
    """
    if not is_count(at_least):
        raise PolicyError(
            f"sac_policies.save_by_flops: at_least {shown(at_least)} is not a count, but operators "
            "count in whole numbers from 0. Use 1 for every operator that has a known count."
        )
    return FlopRule(at_least)


def is_count(value: object) -> bool:
    """Whether `value` is an int from 0 that fits in 64 bits."""
    return type(value) is int and 0 <= value < 2**63


@lru_cache(maxsize=4096)
def is_inside(path: str, glob: str) -> bool:
    """Whether a run of components of the dotted `path` matches `glob`.

    Example:
        >>> is_inside("blocks.3.attn.out", "blocks.*.attn")
        True
    """
    return any(fnmatchcase(run, glob) for run in runs_of(path))


def _entries(ops: tuple[Any, ...], where: str) -> tuple[str, ...]:
    _check_given(ops, "operator", where)
    return tuple(entry_of(each, where=where) for each in ops)


def _check_given(given: tuple[object, ...], what: str, where: str) -> None:
    if not given:
        raise PolicyError(
            f"sac_policies.{where}: no {what} is given, but at least one is needed. "
            "Use recompute_all() to keep nothing."
        )


def _check_texts(texts: tuple[object, ...], what: str, *, where: str) -> None:
    _check_given(texts, what, where)
    for text in texts:
        if not (isinstance(text, str) and text):
            hint = "Write for example 'attn'."
            if isinstance(text, (list, tuple, set)):
                hint = f"Pass each as an argument of its own: {where}(*names)."
            raise PolicyError(
                f"sac_policies.{where}: {what} {shown(text)} is a {type(text).__name__}, but a "
                f"{what} is text that is not empty. {hint}"
            )
