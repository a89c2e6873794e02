"""A report's rows as a table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mod_tracker import OptionError, profile_flops, profile_memory, profile_time


class Block(nn.Module):
    """A container that multiplies, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        """Its own product is twice the inner one's."""
        return torch.cat([self.inner(x)] * 2) @ torch.eye(4)


def _flops(model):
    with profile_flops() as report:
        model(torch.ones(1, 4))
    return report


def test_modules_are_ranked_by_what_they_do_themselves():
    """A container that does nothing itself has no row; one that does has its own part."""
    lines = _flops(nn.Sequential(Block(), nn.Linear(4, 1))).table().splitlines()
    assert lines[0].split() == ["module", "total", "forward", "recompute", "backward"]
    assert [line.split()[:3] for line in lines[2:6]] == [
        ["Sequential.0", "64", "FLOP"],
        ["Sequential.0.inner", "32", "FLOP"],
        ["Sequential.1", "16", "FLOP"],
        ["(outside)", "0", "FLOP"],
    ]


def test_containers_count_with_what_is_inside_them():
    """The root is first, and the modules themselves are there, too."""
    lines = _flops(nn.Sequential(Block())).table(containers=True).splitlines()
    assert lines[0].split()[:3] == ["module", "self", "total"]
    assert [line.split()[0] for line in lines[2:6]] == [
        *("Sequential", "Sequential.0", "Sequential.0.inner", "(outside)")
    ]
    assert lines[2].split()[-2:] == ["96", "FLOP"]


def test_every_column_is_explained():
    """In both tables, each column that is there and no other."""
    for report_of in (profile_flops, profile_time, profile_memory):
        with report_of() as report:
            nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
        for containers, columns in ((False, report.own_columns), (True, report.columns)):
            *_, whose, explained = report.table(containers=containers).splitlines()[
                : -len(report.notes) or None
            ]
            said = [words.split(": ")[0] for words in explained.removesuffix(".").split("; ")]
            assert set(said) == {column.removeprefix("self_") for column in columns}
            assert ("by itself" in whose) == (not containers)


def test_columns_may_be_named_either_way():
    """ "saved" of the module itself is "self_saved"; a limit cuts after sorting."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with profile_memory() as report:
        model(torch.ones(16, 4)).sum().backward()
    assert report.table(by="saved", limit=2) == report.table(by="self_saved", limit=2)
    first = report.table(by="parameters", limit=1).splitlines()[2]
    assert first.startswith("Sequential.0")
    assert len(report.table(limit=1).splitlines()) == 6 + len(report.notes)


@pytest.mark.parametrize("containers", [False, True])
def test_unknown_column_is_refused(containers):
    """With those that there are."""
    with pytest.raises(OptionError, match=r"column 'flop' is unknown.*Choose one of"):
        _flops(nn.Linear(4, 4)).table(by="flop", containers=containers)


def test_numbers_stand_below_each_other():
    """Columns are aligned whatever their width."""
    lines = _flops(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4000))).table().splitlines()
    assert len({len(line) for line in lines[:4]}) == 1
