"""Measured peaks come from the allocator."""

from __future__ import annotations

import pytest
import torch

from sac_policies.budget._measure import storage_bytes

from ._fitted import peak_growth

CPU = torch.device("cpu")
MIB = 2**20


def test_peak_counts_what_is_alive_at_once() -> None:
    """Two consecutive buffers count once, two overlapping buffers twice."""

    def one_after_another() -> None:
        for _ in range(3):
            torch.empty(MIB, dtype=torch.uint8)

    def together() -> None:
        _recipes = [torch.empty(MIB, dtype=torch.uint8) for _ in range(3)]

    assert MIB <= peak_growth(one_after_another, device=CPU) < 2 * MIB
    assert 3 * MIB <= peak_growth(together, device=CPU) < 4 * MIB


def test_peak_counts_temporaries_inside_operators() -> None:
    """A workspace allocated inside a kernel is counted."""
    x = torch.randn(256, 1024)
    growth = peak_growth(lambda: torch.linalg.pinv(x[:, :64]), device=CPU)
    assert growth > 2 * 64 * 256 * 4


def test_peak_ignores_what_was_there_before() -> None:
    """Freeing older memory during the step does not lower the peak."""
    old = [torch.empty(4 * MIB, dtype=torch.uint8)]

    def step() -> None:
        old.clear()
        torch.empty(MIB, dtype=torch.uint8)

    assert MIB <= peak_growth(step, device=CPU) < 2 * MIB


def test_shared_storage_counts_once() -> None:
    """Views, None and other devices are not added."""
    x = torch.ones(100)
    assert storage_bytes([x, x[10:], None, torch.ones(3, device="meta")], device=CPU) == 400


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_peak_counts_what_is_alive_at_once() -> None:
    """On CUDA the peak comes from the caching allocator's statistics."""
    device = torch.device("cuda", 0)

    def together() -> None:
        _recipes = [torch.empty(MIB, dtype=torch.uint8, device=device) for _ in range(3)]

    assert 3 * MIB <= peak_growth(together, device=device) < 4 * MIB
