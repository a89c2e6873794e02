"""What to keep, as values: rules, builders, matching, names, JSON."""

from sac_policies.policies._catalogue import CATALOGUE, Group
from sac_policies.policies._decisions import Decision, from_torch, to_torch
from sac_policies.policies._functions import as_policy
from sac_policies.policies._json import from_json, to_json
from sac_policies.policies._plans import Plan, save_by_index
from sac_policies.policies._views import OpView

__all__ = [
    "CATALOGUE",
    "Decision",
    "Group",
    "OpView",
    "Plan",
    "as_policy",
    "from_json",
    "from_torch",
    "save_by_index",
    "to_json",
    "to_torch",
]
