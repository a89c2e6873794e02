"""What to save, recompute or offload in backward, by rule or from a memory budget.

    from sac_policies import ATTENTION, MATMULS, checkpoint, save_ops

    y = checkpoint(block, x, policy=save_ops(MATMULS, ATTENTION))

A policy is a frozen value; eager and compiled code make the same decisions from it. It does not
choose what a region is: wrap the modules you want checkpointed.
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
from sac_policies._in_slices import in_slices
from sac_policies.eager._moved_stats import (
    OffloadStats,
    limit_offload,
    offload_stats,
)
from sac_policies.policies._budget_plan import BudgetPlan, Infeasible
from sac_policies.policies._builders import (
    offload,
    recompute_all,
    recompute_ops,
    save_all,
    save_by_bytes,
    save_by_flops,
    save_by_shape,
    save_every_nth,
    save_modules,
    save_named,
    save_ops,
    scoped,
)
from sac_policies.policies._catalogue import (
    ATTENTION,
    CATALOGUE,
    COLLECTIVES,
    CONVOLUTIONS,
    MATMULS,
    MATMULS_2D,
    QUANTISED,
    RANDOM,
    Group,
)
from sac_policies.policies._decisions import Decision, from_torch, to_torch
from sac_policies.policies._functions import as_policy
from sac_policies.policies._names import name
from sac_policies.policies._plans import Plan, save_by_index
from sac_policies.policies._policies import Policy, first_match
from sac_policies.policies._views import OpView

if TYPE_CHECKING:
    from sac_policies._report import Report, Row, report
    from sac_policies.budget import (
        Fit,
        InPlaceFit,
        Item,
        ParetoPoint,
        RegionFit,
        StepTrace,
        Trace,
        TracedConstant,
        TracedOp,
        TracedPack,
        fit,
        fit_,
        format_size,
        measure_host_bandwidth,
        pareto,
        pareto_from_json,
        pareto_to_json,
        parse_size,
        plot_pareto,
        profile,
        profile_step,
        solve,
    )
    from sac_policies.policies._json import from_json, to_json

__all__ = [
    "ATTENTION",
    "CATALOGUE",
    "COLLECTIVES",
    "CONVOLUTIONS",
    "MATMULS",
    "MATMULS_2D",
    "QUANTISED",
    "RANDOM",
    "BudgetError",
    "BudgetPlan",
    "ConflictError",
    "Decision",
    "DecisionError",
    "EngineError",
    "Fit",
    "Group",
    "InPlaceFit",
    "Infeasible",
    "Item",
    "MutationError",
    "OffloadStats",
    "OpView",
    "ParetoPoint",
    "Plan",
    "Policy",
    "PolicyError",
    "RecomputeError",
    "RegionFit",
    "Report",
    "Row",
    "SacError",
    "SlicesError",
    "StepTrace",
    "Trace",
    "TracedConstant",
    "TracedOp",
    "TracedPack",
    "UnmatchedEntryWarning",
    "UnmatchedNameError",
    "as_policy",
    "checkpoint",
    "context_fn",
    "first_match",
    "fit",
    "fit_",
    "format_size",
    "from_json",
    "from_torch",
    "in_slices",
    "limit_offload",
    "measure_host_bandwidth",
    "name",
    "offload",
    "offload_stats",
    "pareto",
    "pareto_from_json",
    "pareto_to_json",
    "parse_size",
    "plot_pareto",
    "profile",
    "profile_step",
    "recompute_all",
    "recompute_ops",
    "report",
    "save_all",
    "save_by_bytes",
    "save_by_flops",
    "save_by_index",
    "save_by_shape",
    "save_every_nth",
    "save_modules",
    "save_named",
    "save_ops",
    "scoped",
    "solve",
    "to_json",
    "to_torch",
]
__version__ = "0.1.0"

_ON_REQUEST = {
    **dict.fromkeys(("Report", "Row", "report"), "_report"),
    **dict.fromkeys(("from_json", "to_json"), "policies._json"),
}


def __getattr__(name: str) -> Any:
    """Load reports, budgets and JSON when one is first asked for: a region needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = import_module(f"{__name__}.{_ON_REQUEST.get(name, 'budget')}")
    value = globals()[name] = getattr(room, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
