"""A function that ran under the watching mode can still be compiled."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sac_policies import checkpoint, fit_, profile, recompute_all, report
from sac_policies._torch_compat._dispatch import LETS_COMPILE


def leaf(*shape: int) -> torch.Tensor:
    """A leaf of evenly spaced values."""
    numel = torch.Size(shape).numel()
    return torch.linspace(-1.3, 1.7, numel).reshape(shape).requires_grad_()


pytestmark = [
    pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # dynamo's
]


GRAPHS = SimpleNamespace(sizes=[])
"""Numbers of nodes; outside of the module, whose attributes are restored."""


class _Partly(nn.Module):
    """A linear layer, followed by compiled code; x is (8, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.compiled = torch.compile(lambda t: t.sin() * (2.0 - t), backend=self._backend)

    def _backend(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        GRAPHS.sizes.append(len(graph.graph.nodes))
        return graph.forward

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return self.compiled(self.layer(t))


WATCHED: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "checkpoint": lambda m, x: checkpoint(m, x, policy=recompute_all()),
    "report": lambda m, x: report(m, x, policy=recompute_all()),
    "profile": profile,
    "fit_": lambda m, x: fit_(m, x, "99%"),
}


@pytest.mark.skipif(not LETS_COMPILE, reason="torch 2.9 runs compiled code eagerly in a mode")
@pytest.mark.parametrize("name", WATCHED)
def test_code_that_is_first_met_while_watched_is_compiled(name: str) -> None:
    """torch permanently skips code that it first meets in any other dispatch mode."""
    torch._dynamo.reset()
    GRAPHS.sizes.clear()
    model, x = _Partly(), leaf(8, 16)
    WATCHED[name](model, x)
    model(x)
    assert GRAPHS.sizes
    assert len(set(GRAPHS.sizes)) == 1
