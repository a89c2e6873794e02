"""What containers and objects hold is noted, compared, and given again in copies."""

from __future__ import annotations

import pytest
import torch

from sac_policies import EngineError, checkpoint, recompute_all


def test_object_that_cannot_be_copied_is_refused_by_name():
    """The error says which argument, of what type, and the way out."""

    class Stubborn:
        def __init__(self) -> None:
            self.count = 0

        def __copy__(self):
            raise TypeError("no copies")

    def function(x, held):
        held.count += 1
        return x.sin().exp()

    x = torch.randn(3, requires_grad=True)
    out = checkpoint(function, x, Stubborn(), policy=recompute_all(), engine="contexts")
    with pytest.raises(
        EngineError,
        match=r"argument held of type Stubborn was changed by its region and cannot be copied "
        r"\(no copies\), but .* engine=\"recipe\"\.",
    ):
        out.sum().backward()
