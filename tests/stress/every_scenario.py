"""All scenarios, in the order in which they run."""

from __future__ import annotations

from stress import forks, random_programs, saves, scenes_flat, scenes_local, soak
from stress.trials import Scenario


def scenarios() -> list[Scenario]:
    """Return the scenarios of all five kinds."""
    kinds = (random_programs, scenes_local, scenes_flat, saves, forks, soak)
    return [each for kind in kinds for each in kind.scenarios()]
