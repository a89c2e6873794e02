"""Products of which only a part is computed, or whose elements are complex, beside hand counts."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode

from mod_tracker import profile_flops

N, D, K = 40, 6, 5


def graph():
    """An adjacency matrix with a known number of edges, and features that need a gradient."""
    dense = torch.zeros(N, N)
    dense.view(-1)[:: N // K + 3] = 1
    return dense, int(dense.count_nonzero()), torch.randn(N, D, requires_grad=True)


ADJACENCY, EDGES, X = graph()
C = torch.randn(8, 8, dtype=torch.complex64, requires_grad=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # sparse layouts are in beta state
    BLOCKS = torch.block_diag(*[torch.ones(4, 4)] * (N // 4)).to_sparse_bsr((4, 4))
    COO, CSR, CSC = ADJACENCY.to_sparse_coo(), ADJACENCY.to_sparse_csr(), ADJACENCY.to_sparse_csc()
PAIRS = int((ADJACENCY.sum(0) * ADJACENCY.sum(1)).sum())

CASES = {
    "coo": (lambda: (COO @ X).sum().backward(), 4 * EDGES * D),
    "csr": (lambda: (CSR @ X).sum().backward(), 4 * EDGES * D),
    "csc": (lambda: CSC @ X.detach(), 2 * EDGES * D),
    "sparse.mm": (lambda: torch.sparse.mm(COO, X).sum().backward(), 4 * EDGES * D),
    "sparse.addmm": (lambda: torch.sparse.addmm(X.detach(), COO, X.detach()), 2 * EDGES * D),
    "dense times sparse": (lambda: X.detach().t() @ COO, 2 * EDGES * D),
    "vector": (lambda: COO @ X.detach()[:, 0], 2 * EDGES),
    "coo times coo": (lambda: torch.sparse.mm(COO, COO), 2 * PAIRS),
    "csr times csr": (lambda: CSR @ CSR, 2 * PAIRS),
    "sampled": (
        lambda: torch.sparse.sampled_addmm(CSR, X.detach(), X.detach().t().contiguous()),
        2 * EDGES * D,
    ),
    "blocks": (lambda: BLOCKS @ X.detach(), 2 * (N // 4) * 16 * D),
    "blocks, addmm": (lambda: torch.addmm(X.detach(), BLOCKS, X.detach()), 2 * (N // 4) * 16 * D),
    "complex": (lambda: C.detach() @ C.detach(), 8 * 8**3),
    "complex, backward": (lambda: (C @ C.detach()).abs().sum().backward(), 2 * 8 * 8**3),
    "complex, batch": (lambda: torch.bmm(C.detach()[None], C.detach()[None]), 8 * 8**3),
    "complex, vector": (lambda: C.detach() @ C.detach()[0], 8 * 8**2),
    "complex, einsum": (lambda: torch.einsum("ij,jk->ik", C.detach(), C.detach()), 8 * 8**3),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_flops_are_those_that_are_computed(case):
    run, by_hand = CASES[case]
    with profile_flops() as report:
        run()
    assert report.total == by_hand
    assert report.notes == ()


ROWS, WIDTH, OUT, USED = 24, 16, 8, 10
GROUPED = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # torch 2.9


def grouped(rows, offsets):
    """Three experts over rows that need a gradient; `offsets` end the rows of each."""
    weight = torch.randn(3, WIDTH, OUT, dtype=torch.bfloat16)
    return GROUPED(rows, weight, offs=offsets)


def test_rows_behind_the_last_offset_are_not_multiplied():
    """With expert parallelism, rows of other ranks' experts are behind it."""
    rows = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    with profile_flops() as report:
        grouped(rows, torch.tensor([4, 4, USED], dtype=torch.int32))
    assert report.total == 2 * USED * WIDTH * OUT
    with profile_flops() as report:
        grouped(rows, torch.tensor([4, 4, ROWS], dtype=torch.int32))
    assert report.total == 2 * ROWS * WIDTH * OUT


def test_offsets_of_columns_and_of_the_inner_dimension():
    """The two products of the backward."""
    ends = torch.tensor([4, 4, USED], dtype=torch.int32)
    a, b = (torch.randn(16, ROWS, dtype=torch.bfloat16).t() for _ in range(2))
    batch = torch.randn(3, 8, 16, dtype=torch.bfloat16)
    with profile_flops() as columns:
        GROUPED(batch, b.t().contiguous(), offs=ends)
    with profile_flops() as inner:
        GROUPED(a.t(), b.contiguous(), offs=ends)
    assert columns.total == 2 * 8 * 16 * USED
    assert inner.total == 2 * 16 * 16 * USED


def test_groups_without_data_are_noted():
    with FakeTensorMode(), profile_flops() as report:
        rows = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
        grouped(rows, torch.zeros(3, dtype=torch.int32))
    assert report.total == 2 * ROWS * WIDTH * OUT
    assert report.notes == (
        "without data the longest groups or sequences were assumed: aten._grouped_mm.default (1)",
    )
