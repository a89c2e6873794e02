"""The names of flat-param that the cases use, from the package and its public modules."""

from flat_param import *  # noqa: F403
from flat_param.handle import *  # noqa: F403
from flat_param.plan import *  # noqa: F403
