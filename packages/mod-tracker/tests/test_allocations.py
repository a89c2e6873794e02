"""Which bytes count as allocated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mod_tracker import profile_memory


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2).view(-1)


def test_what_was_there_before_is_not_counted():
    """Changed in place or seen through a view, it is neither allocated, nor freed when it goes."""
    x, model = torch.ones(1000), InPlace()
    with profile_memory() as report:
        y = model(x)
        del x, y
    assert report.rows == {}
    assert (report.total, report.totals["freed"], report.peak) == (0, 0, 0)


def test_what_a_module_makes_is_counted_once_and_freed_once():
    """Views of it, and changes of it in place, add nothing."""
    with profile_memory() as report:
        y = nn.Sequential(nn.ReLU(), InPlace())(torch.ones(1000)[:])
        del y
    assert report["Sequential.0"].allocated == report["Sequential"].allocated == 4000
    assert report.totals["freed"] == report.total


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning")
@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (torch.sparse_coo, ("_indices", "_values")),
        (torch.sparse_csr, ("crow_indices", "col_indices", "values")),
        (torch.sparse_csc, ("ccol_indices", "row_indices", "values")),
        (torch.sparse_bsr, ("crow_indices", "col_indices", "values")),
        (torch.sparse_bsc, ("ccol_indices", "row_indices", "values")),
    ],
)
def test_bytes_of_a_sparse_tensor_are_those_of_its_parts(layout, parts):
    """It has no storage of its own; given to a module it is not made there."""
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    x = torch.eye(8)
    with profile_memory() as report:
        y = nn.Identity()(x.to_sparse(layout=layout, blocksize=blocks))
    storages = {getattr(y, part)().untyped_storage() for part in parts}
    kept = report.totals["allocated"] - report.totals["freed"]
    assert kept == sum(storage.nbytes() for storage in storages) > 0
    assert "Identity" not in report.rows


def test_sparse_gradients_and_their_optimizer_are_counted():
    """An embedding's gradient has its rows' indices and values."""
    model = nn.Embedding(50, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    with profile_memory(model, optimizer=optimizer) as report:
        model(torch.tensor([1, 2, 1])).sum().backward()
        optimizer.step()
    row = report["Embedding"]
    assert (row.parameters, row.gradients) == (50 * 4 * 4, 3 * 8 + 3 * 4 * 4)
    assert row.optimizer == 2 * row.parameters


def test_sparse_tensors_that_are_kept_count_as_saved():
    """As long as the graph is there, once."""

    class Mixes(nn.Module):
        def forward(self, mix, x):
            return torch.sparse.mm(mix, torch.sparse.mm(mix, x))

    mix = torch.eye(4).to_sparse()
    with profile_memory() as report:
        Mixes()(mix, torch.ones(4, 3, requires_grad=True))
    assert report["Mixes"].saved == mix._indices().nbytes + mix._values().nbytes
