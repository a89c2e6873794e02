"""Pure: every exception and warning of the package."""

from __future__ import annotations


class SacError(Exception):
    """Base of every error that sac_policies raises."""


class PolicyError(SacError, ValueError):
    """A policy cannot be built, read or combined as asked."""


class DecisionError(SacError, TypeError):
    """A policy returned something that is not a decision."""


class ConflictError(SacError, ValueError):
    """Two rules ask for different things for one value."""


class EngineError(SacError, RuntimeError):
    """An engine cannot honour a decision, or cannot run here."""


class RecomputeError(SacError, RuntimeError):
    """The recomputation runs other operators than the forward did."""


class MutationError(SacError, RuntimeError):
    """A saved value was changed in place outside its region."""


class BudgetError(SacError, ValueError):
    """A budget or a trace cannot be read."""


class UnmatchedEntryWarning(UserWarning):
    """An entry of a policy matched no operator, module or name of the region."""
