"""Edge: warns of operators that a policy names and never meets, raises for such names.

Rule 1. An operator may run for other inputs or on another device, so an entry that met none in
        the policy's first region is warned of, once.
Rule 2. A module path or a tensor name is the model's own. One that no region under the policy
        has had when a backward first reaches one of them is an error: the forward is over by
        then, with every region that it ran. Modules count whether they ran or not.
Rule 3. Compiled code is asked for operators only. It has no end of the forward to look for names
        at: a model compiled in pieces traces the backward of one before the forward of the next,
        and a trace shows no modules without work.
"""

from __future__ import annotations

import warnings
from functools import lru_cache

from ._errors import UnmatchedEntryWarning, UnmatchedNameError, did_you_mean
from ._policies import Policy
from ._views import Seen, Unmatched


class Watch:
    """What the regions of one policy have had so far.

    Attributes:
        open: whether the end of a forward is to be told.
        missing: names that no region has had.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._seen = Seen({})
        self._first = True
        self.open = True
        self.missing: tuple[Unmatched, ...] = ()

    def forward_traced(self, seen: Seen) -> None:
        """Warn after the policy's first region (Rules 1 and 3)."""
        if self._first:
            self._first = False
            warn_unmatched(self._policy, seen)

    def forward_ended(self, seen: Seen) -> None:
        """Take note of a forward that ended; warn after the first (Rule 1)."""
        self.forward_traced(seen)
        before = self._seen
        self._seen = Seen({}, before.labels | seen.labels, before.modules | seen.modules)
        self.missing = self._policy.missing(self._seen)
        self.open = bool(self.missing)

    def error(self) -> UnmatchedNameError:
        """Say what is missing, where it was written, and what there is instead (Rule 2)."""
        first = self.missing[0]
        known = first.known(self._seen)
        hint = did_you_mean(first.entry, known, otherwise=_listed(sorted(known)))
        return UnmatchedNameError(
            f"sac_policies.{first.rule}: {first.kind} {first.entry!r} (written at {first.line}) is "
            "in no region of the forward that ended, but a policy's names are those of its "
            f"regions; paths start below the module that is checkpointed. {hint} Where some "
            "models lack it, pass missing_ok=True."
        )


@lru_cache(maxsize=256)
def watch_of(policy: Policy) -> Watch:
    """Return the watch of a policy; equal policies share one, as do all their regions."""
    return Watch(policy)


def warn_unmatched(policy: Policy, seen: Seen) -> None:
    """Warn once for all entries of `policy` that nothing in `seen` matches."""
    entries = policy.unmatched(seen)
    if entries:
        ran = [str(getattr(op, "overloadpacket", op)) for op in seen.ops]
        warnings.warn(
            f"sac_policies.checkpoint: entries {', '.join(map(repr, entries))} match nothing in "
            "the region, but every entry of a policy is meant for something. "
            f"{did_you_mean(entries[0], ran, otherwise='Nothing close to it ran.')} Remove them, "
            "or see what ran with sac_policies.report(function, *args, policy=policy).",
            UnmatchedEntryWarning,
            stacklevel=2,
        )


def _listed(known: list[str]) -> str:
    return f"There are {', '.join(map(repr, known[:5]))}." if known else "There are none."
