"""All scenarios, in the order in which they run."""

from __future__ import annotations

from storm import saves, scenes_flat, scenes_local
from storm.trials import Scenario


def scenarios() -> list[Scenario]:
    """Of all five kinds."""
    return [*scenes_local.scenarios(), *scenes_flat.scenarios(), *saves.scenarios()]
