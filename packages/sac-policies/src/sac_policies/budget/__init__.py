"""From a number of bytes to a plan: profiles, a solver, predictions, and measured steps.

Uses `policies`, and runs plans through `checkpoint`.
"""

from sac_policies.budget._fit_in_place import InPlaceFit, fit_
from sac_policies.budget._levels import RegionFit
from sac_policies.budget._profile import profile
from sac_policies.budget._sizes import format_size, parse_size
from sac_policies.budget._solve import BudgetPlan, Infeasible, solve
from sac_policies.budget._trace import Held, Item, Trace, TracedOp, TracedPack

__all__ = [
    "BudgetPlan",
    "Held",
    "InPlaceFit",
    "Infeasible",
    "Item",
    "RegionFit",
    "Trace",
    "TracedOp",
    "TracedPack",
    "fit_",
    "format_size",
    "parse_size",
    "profile",
    "solve",
]
