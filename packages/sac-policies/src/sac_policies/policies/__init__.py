"""Policies as values: decisions, views, plans, and what `checkpoint` accepts."""

from sac_policies.policies._catalogue import CATALOGUE, Group
from sac_policies.policies._decisions import Decision
from sac_policies.policies._functions import as_policy
from sac_policies.policies._plans import Plan, save_by_index
from sac_policies.policies._views import OpView

__all__ = ["CATALOGUE", "Decision", "Group", "OpView", "Plan", "as_policy", "save_by_index"]
