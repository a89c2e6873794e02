"""The names of sac-policies that the cases use, from the package and its public modules."""

from sac_policies import *  # noqa: F403
from sac_policies.budget import *  # noqa: F403
from sac_policies.policies import *  # noqa: F403
from sac_policies.reports import *  # noqa: F403
