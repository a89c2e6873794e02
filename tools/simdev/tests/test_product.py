"""A short part of the product of `product.py`: one seed, in virtual time, where it is hard."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
import product
import seeds
import ways

SEED = 7  # of which a fault comes early, and memory is out at once
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


@pytest.mark.parametrize("cell", CELLS)
def test_no_race_and_plain_gradients(sim, cell):
    """Also after a fault, of which the program is told."""
    assert product.run(*cell.split("/"), SEED, virtual=True) == ([], "")


@pytest.mark.parametrize(("cell", "seed"), seeds.kept())
def test_what_has_failed_once_is_right(sim, cell, seed):
    """A race that was mended stays so; see what it found in seeds.json."""
    assert list(product.try_seed(seed, [cell])) == [(cell, ([], ""))]


def test_a_race_and_other_gradients_are_told(sim, monkeypatch, tmp_path):
    """A way that forgets a wait fails its cell, and the table says so; the seed is kept."""
    from ckpt_wrap.offload import _host_tier

    cell, kept = "offload/host far ahead", tmp_path / "seeds.json"
    kept.write_text("[]")
    monkeypatch.setattr(seeds, "PATH", kept)
    with monkeypatch.context() as broken:
        broken.setattr(_host_tier.StreamCopy, "wait", lambda self: None)
        result = product.search(0, SEED, 1, [cell])
    (failure,) = result["failures"]
    assert failure.startswith(f"seed {SEED}, {cell}: ")
    assert " races, " in product.page(result)
    assert seeds.kept() == {(cell, SEED): failure.partition(f"{cell}: ")[2]}


def test_what_has_failed_before_is_tried_first(sim, monkeypatch, tmp_path):
    """In its cell alone, once each, whichever seeds are asked for; other cells are left out."""
    monkeypatch.setattr(seeds, "PATH", tmp_path / "seeds.json")
    seeds.PATH.write_text("[]")
    for cell, seed in (("b", 3), ("a", 9), ("gone", 1), ("a", 9)):
        seeds.keep(cell, seed, f"of {cell}")
    tried = []
    monkeypatch.setattr(product, "try_seed", lambda *run: tried.append(run) or ())
    result = product.search(0, 5, 1, ["a", "b"])
    assert tried == [(9, ["a"]), (3, ["b"]), (5, ["a", "b"])]
    assert (result["first"], result["last"]) == (5, 5)


def test_a_cell_that_ends_its_ranks_is_found_among_others(sim, monkeypatch):
    """Each is run alone then, so that only what fails is told, and kept."""
    from simdev import ranks

    def on_ranks(function, cells, seed, limit_s):
        assert "jitter" not in "".join(cells), "rank 0: did not end"
        return [[([], "")] * len(cells)] * 2

    monkeypatch.setattr(ranks, "on_ranks", on_ranks)
    good, bad = "sharded, prefetch/one device", "sharded, prefetch/jitter"
    told = dict(product.try_seed(SEED, [good, bad]))
    assert told[good] == ([], "")
    assert told[bad][1].startswith("on ranks: ")


def test_a_fault_that_nobody_is_told_of_is_one(sim, monkeypatch):
    """A program that goes on with what a failed copy left has not been told."""
    monkeypatch.setattr(ways, "_told", lambda step: step() or False)
    _, wrong = product.run("offload", "failing copy out", SEED, virtual=True)
    assert "nobody was told of the fault" in wrong or "a fault was asked for" in wrong


def test_what_a_failed_step_leaves_is_told(sim, monkeypatch):
    """By its bytes."""
    kept = []
    real = ways._told

    def told(step):
        answer = real(step)
        kept.append(ways.given())
        return answer

    monkeypatch.setattr(ways, "_told", told)
    _, wrong = product.run("recipes", "out of memory", SEED, virtual=True)
    assert wrong == "Fault: the step that failed left 8192 bytes behind"


def test_the_table_is_written_between_its_marks(tmp_path):
    """And what stands around it is left alone."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{product.BEGIN}\nold\n{product.END}\nafter\n")
    cells = {"offload/one device": {"runs": 3, "races": 0, "wrong": 0}}
    text = product.page({"first": 0, "last": 2, "cells": cells, "failures": []})
    product.write(page, text)
    told = page.read_text()
    assert told.startswith("before\n")
    assert told.endswith("after\n")
    assert "old" not in told
    assert "Seeds 0 to 2" in told
    assert "| one device | 3 | not run |" in told
    assert "| graph pool | not run |" in told
