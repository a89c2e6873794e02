"""Broken regions whose forwards are not alike; each fails exactly what it declares."""

from __future__ import annotations

from unittest.mock import patch

from torchparts_conformance.mutants import mutant, overlay

AREA = "sac-policies"
_KNOWS = "sac_policies.engines.recipe.regions._left.Rest.take"


@mutant(area=AREA, kills={"SP-210"})
def rest_of_another_forward_knows_nothing(part):
    """Takes what was made before a forward left the steps of others for its caller's."""

    def checkpoint(function, *args, **kwargs):
        with patch(_KNOWS, lambda *given: None):
            return part.checkpoint(function, *args, **kwargs)

    return overlay(part, checkpoint=checkpoint)
