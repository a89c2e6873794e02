"""Reports entries of a policy that match nothing in its regions.

- An operator may run for other inputs or on another device, so a list of which no entry matches
  only gives a warning, after the first forward of each module or function under the policy.
- A module path or a tensor name that no region had when backward starts is an error, since the
  forward has ended. Modules count even if they did not run.
- Compiled code only warns about operators, once for each set of operators: a trace does not know
  its function, and backward may be traced before later regions.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from types import CodeType
from typing import Any

from .._errors import UnmatchedEntryWarning, UnmatchedNameError, did_you_mean, shown
from .._frames import user_stacklevel
from ._modules import root_of
from ._per_policy import PerPolicy
from ._policies import Policy
from ._views import Missing, RegionSummary, runs_of

_MOST_SAID = 8


class PolicyUse:
    """Names and operators that the regions of one policy had so far.

    Attributes:
        known: functions and modules whose forward has ended under the policy, by `id`.
        open: whether `forward_ended` must be called.
        missing: names of the policy that no region had.
        running: an entry for each region that runs now, in any thread; they may still have a
            missing name.
    """

    def __init__(self) -> None:
        self._seen = RegionSummary({})
        self.known: dict[int, weakref.ref[Any]] = {}
        self._traced: set[frozenset[str]] = set()
        self.open = True
        self.missing: tuple[Missing, ...] = ()
        self.running: list[None] = []

    def is_new(self, function: object) -> bool:
        """Whether no forward of this function has ended yet."""
        return id(subject_of(function)) not in self.known

    def forward_traced(self, policy: Policy, seen: RegionSummary) -> None:
        """Warn after a trace whose operators differ from those of earlier traces."""
        ran = frozenset(_names(seen))
        if ran not in self._traced:
            self._traced.add(ran)
            self._warn(policy, seen, "")

    def forward_ended(self, policy: Policy, seen: RegionSummary, function: object) -> None:
        """Record a forward; warn after the first one of a function."""
        if self.is_new(function):
            known, subject = self.known, subject_of(function)
            key = id(subject)
            known[key] = weakref.ref(subject, lambda gone: known.pop(key, None) and None)
            self._warn(policy, seen, f" {_name_of(function)!r}")
        if self.open:
            before = self._seen
            self._seen = RegionSummary(
                {}, before.labels | seen.labels, before.modules | seen.modules
            )
            self.missing = policy.missing(self._seen)
            self.open = bool(self.missing)

    def error(self) -> UnmatchedNameError:
        """Make the error about the first missing name."""
        kind, entry = self.missing[0]
        if kind == "module":
            known = {run for path in self._seen.modules for run in runs_of(path) if run}
            rule, none = "paths start below the checkpointed module", "It has no modules."
        else:
            known = set(self._seen.labels)
            rule = f"forward must call checkpoint_name(tensor, {entry!r}) in a region"
            none = "No tensor was named."
        hint = did_you_mean(entry, known, otherwise=_listed(known) if known else none)
        return UnmatchedNameError(
            f"sac_policies.checkpoint: {kind} {entry!r} of the policy is in no region of the "
            f"forward that ended, but {rule}. {hint} If some models lack it, pass missing_ok=True."
        )

    def _warn(self, policy: Policy, seen: RegionSummary, region: str) -> None:
        """Warn about all entries that match nothing."""
        entries = policy.unmatched(seen)
        if entries:
            said = ", ".join(map(shown, entries[:_MOST_SAID]))
            more = len(entries) - _MOST_SAID
            warnings.warn(
                f"sac_policies.checkpoint: entries {said}{f' and {more} more' if more > 0 else ''} "
                f"match nothing in the region{region}, but at least one entry of each list should. "
                f"{_hint(entries[0], _names(seen))} Remove them, "
                "or see what ran with sac_policies.report(function, *args, policy=policy).",
                UnmatchedEntryWarning,
                stacklevel=user_stacklevel(),
            )


uses = PerPolicy(lambda policy: PolicyUse())


def subject_of(function: object) -> object:
    """Return an object that identifies a function: its module, its code, or its type."""
    module = root_of(function)
    if module is not None:
        return module
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else type(function)


def _name_of(function: object) -> str:
    subject = subject_of(function)
    if isinstance(subject, CodeType):
        return subject.co_name
    kind = subject if isinstance(subject, type) else type(subject)
    return str(getattr(function, "__name__", kind.__name__))


def _names(seen: RegionSummary) -> list[str]:
    return [str(getattr(op, "overloadpacket", op)) for op in seen.ops]


def _hint(entry: str, ran: list[str]) -> str:
    """Suggest operators that ran: those with a similar name, or the first ones."""
    # A shared namespace would make any two names look similar.
    tails = {name.partition(".")[2] or name: name for name in ran}
    tail = entry.partition(".")[2].partition(".")[0]
    first = ", ".join(map(repr, sorted(set(ran))[:5])) or "nothing"
    return did_you_mean(tail or entry, tails, otherwise=f"What ran: {first}.")


def _listed(known: set[str]) -> str:
    return f"There are {', '.join(map(repr, sorted(known)[:5]))}." if known else "There are none."
