"""Shared fixtures: a block to checkpoint, counted operators, gradients to compare."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from sac_policies import checkpoint, recompute_all
from sac_policies._torch_compat import saved_tensor_hooks
from sac_policies.policies._unmatched import uses
from torchparts_conformance.ranks import Ranks


@pytest.fixture(autouse=True)
def _no_table_of_another_test() -> None:
    """Clear the cache of warnings that equal policies share between tests."""
    uses.clear()


@pytest.fixture(autouse=True)
def _nothing_stays_entered() -> Iterator[None]:
    """However a region ended, no saved-tensor hooks and no dispatch modes remain."""
    yield
    hooks, modes = saved_tensor_hooks(), _get_current_dispatch_mode_stack()
    assert hooks is None, f"hooks for saved tensors are still entered: {hooks}"
    assert modes == [], f"dispatch modes are still entered: {modes}"
    if torch.__version__.startswith("2.9."):
        # Threads that enter and leave modes can leave these set: then nothing is compiled.
        _python_dispatch._is_in_torch_dispatch_mode = False
        _python_dispatch._is_in_non_infra_torch_dispatch_mode = False
        _python_dispatch._is_in_any_mode_without_ignore_compile_internals = False


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Compile nothing that an earlier test has compiled, and leave nothing compiled."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def no_race() -> Iterator[None]:
    """On the simulated device, fail the test if a race was reported."""
    sim: Any = getattr(torch, "simdev", None)
    if sim is not None:
        sim.reset()
    yield
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    gc.collect()
    races = [] if sim is None else sim.races()
    if sim is not None:
        sim.reset()
    assert races == []


class _Block(nn.Module):
    """A transformer block: norm, attention, norm, gated feed-forward; x is (batch, tokens, 16)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(a.transpose(1, 2).reshape(b, t, d)))
        return x + self.drop(self.down(F.silu(self.up(self.n2(x)))))


class _Counts(TorchDispatchMode):
    """Counts operators by name while entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def __getitem__(self, op: str) -> int:
        return self.counts[op]


@pytest.fixture
def make_block() -> Callable[..., nn.Module]:
    """Make a block with fixed weights."""

    def make(dropout: float = 0.0) -> nn.Module:
        torch.manual_seed(0)
        return _Block(dropout)

    return make


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disable the garbage collector, so that only reference counts free objects."""
    t = torch.zeros(2, requires_grad=True)  # the first use of a policy imports and observes
    checkpoint(torch.sin, t, policy=recompute_all()).sum().backward()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def counting() -> type[_Counts]:
    """Return the mode that counts operators."""
    return _Counts


@pytest.fixture
def x() -> torch.Tensor:
    """A block's input, (2, 4, 16)."""
    torch.manual_seed(1)
    return torch.randn(2, 4, 16, requires_grad=True)


@pytest.fixture
def gradients() -> Callable[..., list[torch.Tensor]]:
    """Return gradients of the squared output with respect to inputs and parameters."""

    def run(call: Callable[..., Any], *inputs: torch.Tensor, module: Any = None) -> list[Any]:
        torch.manual_seed(2)
        wanted = [*inputs, *(module.parameters() if module is not None else ())]
        return list(torch.autograd.grad(call(*inputs).square().sum(), wanted))

    return run


@pytest.fixture
def equal() -> Callable[..., bool]:
    """Compare two lists of gradients bit by bit."""

    def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
        return len(left) == len(right) and all(
            torch.equal(a, b) for a, b in zip(left, right, strict=True)
        )

    return same


def run_workers(rank: int, size: int, sources: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Run each module's `WORKER` on one rank; return what it put into `found`."""
    results: dict[str, dict[str, Any]] = {}
    for name, source in sources.items():
        found = results[name] = {}
        given = {"torch": torch, "dist": dist, "rank": rank, "size": size, "found": found}
        exec(compile(source, name, "exec"), given)
    return results


@pytest.fixture(scope="session")
def _all_ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Results by rank and module; one launch runs the workers of all selected modules."""
    items = [
        each
        for each in request.session.items
        if "ranks" in each.fixturenames and Path(__file__).parent in each.path.parents  # type: ignore[attr-defined]
    ]
    sources = {each.module.__name__: each.module.WORKER for each in items}  # type: ignore[attr-defined]
    with contextlib.closing(Ranks("sac_policies", options=["-W", "error"])) as ranks:
        return ranks(2, f"{__file__}::run_workers", sources, timeout_s=180)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, _all_ranks: list[dict[str, Any]]) -> list[Any]:
    """Results of two processes by rank: each runs the module's `WORKER`, which fills `found`."""
    return [each[request.module.__name__] for each in _all_ranks]
