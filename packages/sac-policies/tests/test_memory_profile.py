"""The profiler notes allocations and named ranges alone, or all where torch's is another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile, record_function

from sac_policies._torch_compat._memory_profile import MemoryProfile


def noted(profiler: Any) -> tuple[list[int], list[str]]:
    """Bytes of allocations, negative where they are freed, and other names, in order."""
    x = torch.ones(64, 64, requires_grad=True)
    with profiler as seen:
        with record_function("named"):
            y = (x @ x).sin()
        y.sum().backward()
        del y
    events = sorted(seen.kineto_results.events(), key=lambda event: event.start_ns())
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return sizes, [event.name() for event in events if event.name() != "[memory]"]


def test_allocations_are_those_that_torchs_profiler_notes() -> None:
    """And a range, without the operators between."""
    noted(MemoryProfile())  # the first backward of a process allocates something of its own
    sizes, names = noted(MemoryProfile())
    expected, others = noted(profile(profile_memory=True, use_kineto=True))
    assert sizes == expected
    assert sum(size > 0 for size in sizes) > 3
    assert names == ["named"]
    assert {"named", "aten::mm", "aten::sin"} <= set(others)


@pytest.mark.parametrize("missing", [True, False])
def test_where_torch_starts_its_profiler_otherwise_all_is_noted(
    missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no such name, or it takes no scopes."""
    sizes, _ = noted(MemoryProfile())
    start: Any = torch._C._autograd._enable_profiler
    if missing:
        monkeypatch.delattr(torch._C._autograd, "_enable_profiler")
    else:
        monkeypatch.setattr(torch._C._autograd, "_enable_profiler", lambda one, other: start)
    found, names = noted(MemoryProfile())
    assert found == sizes
    assert "aten::mm" in names
