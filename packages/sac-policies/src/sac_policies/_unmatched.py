"""Edge: warns of policy entries that match nothing."""

from __future__ import annotations

import warnings

from ._errors import UnmatchedEntryWarning
from ._policies import Policy
from ._views import Seen


def warn_unmatched(policy: Policy, seen: Seen) -> None:
    """Warn once for all entries of `policy` that nothing in `seen` matches."""
    entries = policy.unmatched(seen)
    if entries:
        warnings.warn(
            f"sac_policies.checkpoint: entries {', '.join(map(repr, entries))} match nothing in "
            "the region, but every entry of a policy is meant for something. Remove them, or see "
            "what ran with sac_policies.report(function, *args, policy=policy).",
            UnmatchedEntryWarning,
            stacklevel=2,
        )
