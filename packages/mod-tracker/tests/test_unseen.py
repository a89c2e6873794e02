"""Storages that are made without an operator, or change their size in one."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from torch import nn

from mod_tracker import assert_no_growth, profile_memory

ROWS = [[0.5] * 64 for _ in range(100)]
SIZE = 100 * 64 * 4
SAVED = io.BytesIO()
torch.save(torch.zeros(100, 64), SAVED)

WAYS = {
    "tensor": lambda: torch.tensor(ROWS),
    "as_tensor": lambda: torch.as_tensor(ROWS),
    "from_numpy": lambda: torch.from_numpy(np.zeros((100, 64), np.float32)),
    "frombuffer": lambda: torch.frombuffer(bytearray(SIZE), dtype=torch.float32).view(100, 64),
    "load": lambda: torch.load(io.BytesIO(SAVED.getvalue())),
    "resize_": lambda: torch.empty(0).resize_(100, 64).zero_(),
    "out": lambda: torch.zeros(100, 64, out=torch.empty(0)),
    "zeros": lambda: torch.zeros(100, 64),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore")
def test_storage_counts_however_it_is_made(way):
    """At the latest when the layer uses it; the layer adds its result."""
    model = nn.Linear(64, 8)
    with torch.no_grad(), profile_memory(model) as report:
        kept = WAYS[way]()
        out = model(kept)
    assert report.peak == SIZE + out.nbytes
    assert report.total == SIZE + out.nbytes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore")
def test_buffer_of_them_is_a_leak(way):
    model, kept = nn.Linear(64, 8), []

    def step():
        kept.append(WAYS[way]())
        model(kept[-1]).sum().backward()

    with pytest.raises(AssertionError, match=r"25\.6 kB a step"):
        assert_no_growth(step)


@pytest.mark.parametrize("grow", [lambda x: x.resize_(200), lambda x: torch.zeros(200, out=x)])
@pytest.mark.filterwarnings("ignore")
def test_only_the_growth_of_an_earlier_storage_counts(grow):
    x = torch.zeros(50)
    with profile_memory() as report:
        grow(x)
    assert (report.total, report.peak) == (150 * 4, 150 * 4)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_their_indices_and_values():
    """The gradient of a sparse embedding, and a matrix in each layout."""
    model, tokens = nn.Embedding(100, 8, sparse=True), torch.arange(3)
    with profile_memory(model) as report:
        model(tokens).sum().backward()
    assert report["Embedding"].gradients == 3 * 8 + 3 * 8 * 4
    rows, columns, values = torch.arange(5), torch.arange(4), torch.ones(4)
    for kept, size in (
        (torch.sparse_coo_tensor(torch.zeros(2, 4, dtype=torch.int64), values), 8 * 8 + 16),
        (torch.sparse_csr_tensor(rows, columns, values), 9 * 8 + 16),
        (torch.sparse_csc_tensor(rows, columns, values), 9 * 8 + 16),
    ):
        holder = nn.ParameterList([nn.Parameter(kept, requires_grad=False)])
        with profile_memory(holder) as report:
            torch.ones(1)
        assert report.totals["parameters"] == size
