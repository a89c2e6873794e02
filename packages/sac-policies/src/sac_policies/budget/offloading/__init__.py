"""Which values to keep, repeat or offload, where copies to the host are hidden behind other work.

Knows traces and the knapsack, and nothing of plans: `choose` is given numbers and returns which.
"""

from sac_policies.budget.offloading._bounds import Solver
from sac_policies.budget.offloading._choice import Choice, choose
from sac_policies.budget.offloading._copies import Copies

__all__ = ["Choice", "Copies", "Solver", "choose"]
