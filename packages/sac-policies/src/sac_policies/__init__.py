"""What to save, recompute or offload in backward, by rule or from a memory budget.

    from sac_policies import ATTENTION, MATMULS, checkpoint, save_ops

    y = checkpoint(block, x, policy=save_ops(MATMULS, ATTENTION))

A policy is a frozen value; eager and compiled code make the same decisions from it. It does not
choose what a region is: wrap the modules you want checkpointed.

Types of arguments and results, and less used functions, are in `sac_policies.budget`,
`sac_policies.policies` and `sac_policies.reports`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sac_policies._checkpoint import checkpoint, context_fn
from sac_policies._errors import (
    BudgetError,
    ConflictError,
    DecisionError,
    EngineError,
    MutationError,
    PolicyError,
    RecomputeError,
    SacError,
    SlicesError,
    UnmatchedEntryWarning,
    UnmatchedNameError,
)
from sac_policies._in_slices import in_slices, in_slices_
from sac_policies.eager._moved import offload_stats
from sac_policies.policies._catalogue import (
    ATTENTION,
    COLLECTIVES,
    CONVOLUTIONS,
    MATMULS,
    MATMULS_2D,
    QUANTISED,
)
from sac_policies.policies._names import checkpoint_name
from sac_policies.policies._policies import Policy, first_match
from sac_policies.policies._rules import (
    offload,
    recompute_all,
    recompute_ops,
    save_all,
    save_by_bytes,
    save_by_flops,
    save_every_nth,
    save_modules,
    save_named,
    save_ops,
    scoped,
)

if TYPE_CHECKING:
    from sac_policies.budget import fit_, profile, solve
    from sac_policies.reports import report

__all__ = [
    "ATTENTION",
    "COLLECTIVES",
    "CONVOLUTIONS",
    "MATMULS",
    "MATMULS_2D",
    "QUANTISED",
    "BudgetError",
    "ConflictError",
    "DecisionError",
    "EngineError",
    "MutationError",
    "Policy",
    "PolicyError",
    "RecomputeError",
    "SacError",
    "SlicesError",
    "UnmatchedEntryWarning",
    "UnmatchedNameError",
    "checkpoint",
    "checkpoint_name",
    "context_fn",
    "first_match",
    "fit_",
    "in_slices",
    "in_slices_",
    "offload",
    "offload_stats",
    "profile",
    "recompute_all",
    "recompute_ops",
    "report",
    "save_all",
    "save_by_bytes",
    "save_by_flops",
    "save_every_nth",
    "save_modules",
    "save_named",
    "save_ops",
    "scoped",
    "solve",
]
__version__ = "0.1.0"

_SUBMODULES = ("budget", "reports")


def __getattr__(name: str) -> Any:
    """Load reports and budgets at first use: a region needs none of them."""
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    submodule = import_module(f"{__name__}.{'reports' if name == 'report' else 'budget'}")
    value = globals()[name] = getattr(submodule, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
