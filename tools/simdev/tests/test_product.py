"""Every way of saving memory in situations with streams, threads, graphs and faults."""

from __future__ import annotations

import os

import _product as product
import _ways as ways
import pytest
import torch
from torch import nn

SEEDS = [int(seed) for seed in os.environ.get("SIMDEV_SEEDS", "7").split()]
HARD = (
    "two streams",
    "two backward threads",
    "pipeline of micro-batches",
    "graph pool",
    "refused capture",
    "stopped backward",
    "stopped backward, two threads",
    "stopped backward, inside another",
    *sorted(ways.FAULTS),
)
CELLS = [cell for cell in product.cells_of(ways.WAYS) if cell.split("/")[1] in HARD]
# Runs that once found a defect.
REGRESSIONS = [
    ("offload by policy/slow copies", 0),
    ("offload by policy/two streams", 1),
    ("offload/host far ahead", 1),
    ("offload/refused capture", 3000),
]
SHARDED_REGRESSIONS = [
    ("sharded, kept after forward/stopped backward", 3),
    ("sharded, prefetch/side stream", 1),
    ("sharded, prefetch/stopped backward, inside another", 3),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cell", CELLS)
def test_no_race_and_plain_gradients(sim, cell, seed):
    """In virtual time; a fault reaches the program as an error."""
    assert product.run(*cell.split("/"), seed) == ([], "")


@pytest.mark.parametrize(("cell", "seed"), REGRESSIONS)
def test_no_race_where_one_was_found_before(sim, cell, seed):
    assert product.run(*cell.split("/"), seed) == ([], "")


@pytest.mark.parametrize(("cell", "seed"), SHARDED_REGRESSIONS)
def test_no_race_where_two_ranks_had_one_before(sim, cell, seed):
    assert product.run_on_ranks([cell], seed) == {cell: ([], "")}


class Careless(nn.Module):
    """A block that copies saved tensors to the host on another stream, without any wait."""

    def __init__(self, block):
        super().__init__()
        self.block, self.side = block, torch.Stream(ways.ZERO)

    def pack(self, tensor):
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with self.side:
            return host.copy_(tensor, non_blocking=True)

    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda host: host.to(ways.ZERO)):
            return self.block(x)


def test_race_of_a_missing_wait_is_reported(sim, monkeypatch):
    """Otherwise the runs above would prove nothing."""
    monkeypatch.setitem(product.ALL, "careless", Careless)
    races, wrong = product.run("careless", "host far ahead", 7)
    assert races or wrong


def test_fault_without_an_error_is_reported(sim, monkeypatch):
    """After a failed copy the program must get an error."""
    monkeypatch.setattr(ways, "_told", lambda step: step() or False)
    _, wrong = product.run("offload", "failing copy out", 7)
    assert "nobody was told of the fault" in wrong or "a fault was asked for" in wrong


def test_memory_left_by_a_failed_step_is_reported(sim, monkeypatch):
    """With its bytes."""
    kept = []
    real = ways._told

    def told(step):
        answer = real(step)
        kept.append(ways.given())
        return answer

    monkeypatch.setattr(ways, "_told", told)
    _, wrong = product.run("replay", "out of memory", 7)
    assert wrong == "Fault: the step that failed left 8192 bytes behind"
