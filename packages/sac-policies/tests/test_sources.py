"""What a region knows of values that replays read: its own cells and sources, and no longer."""

from __future__ import annotations

import gc
import weakref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from sac_policies import recompute_all
from sac_policies._torch_compat import node_number
from sac_policies.engines.recipe._replay_entries import ReplayTable
from sac_policies.engines.recipe._shared_values import SharedValue, Source
from sac_policies.engines.recipe._sources import Edges, living

from ._recipe import leaf


def test_readers_of_a_nodes_output_share_one_cell():
    """Each region has its own: what they keep goes through other hooks (Rule 1)."""
    one, other, node = Edges(), Edges(), leaf(2).sin().grad_fn
    assert one.cell(node) is one.cell(node)
    assert one.cell(node) is not other.cell(node)
    assert one.cell(node) is not one.cell(leaf(2).sin().grad_fn)


def test_cells_go_with_their_node():
    """They lie in its metadata; the region holds no node for them."""
    edges, made = Edges(), leaf(2).sin()
    cell = weakref.ref(edges.cell(made.grad_fn))
    assert cell() is not None
    gc.disable()
    try:
        del made
        assert cell() is None
    finally:
        gc.enable()


def test_node_saves_its_result_once_and_while_it_is_the_last_made():
    """Before the next node is there."""
    edges, made = Edges(), leaf(2).exp()
    number = node_number(made.grad_fn)
    assert edges.ends(number)
    assert not edges.ends(number)
    later = made.exp()
    assert not Edges().ends(number)
    assert edges.ends(node_number(later.grad_fn))


def test_kept_output_is_held_by_its_number():
    """One of several outputs is; the others are not."""
    edges, parts = Edges(), leaf(4).split(2)
    node, held = parts[1].grad_fn, object()
    edges.keep(parts[1], held)
    assert edges.is_held(node, 1)
    assert edges.held(node, 1) is held
    assert not edges.is_held(node, 0)
    assert edges.held(node, 0) is None


def test_what_a_plan_keeps_is_read_and_is_no_reason():
    """Whether a value can be rebuilt does not depend on it; what else is kept comes first."""
    edges, made = Edges(), leaf(2).sin()
    edges.planned[made.grad_fn, 0] = "planned"
    assert edges.held(made.grad_fn, 0) == "planned"
    assert not edges.is_held(made.grad_fn, 0)
    edges.keep(made, "kept")
    assert edges.held(made.grad_fn, 0) == "kept"


def test_kept_output_has_one_source():
    """For all recipes that read it, with what is held of it."""
    edges, node = Edges(), leaf(2).sin().grad_fn
    kept = torch.ones(2)
    source = edges.source(node, 0, kept, lambda held: held * 2)
    assert edges.source(node, 0, kept, lambda held: held) is source
    assert edges.source(node, 1, kept, lambda held: held) is not source
    assert torch.equal(source.value(), kept * 2)


def test_entry_is_that_of_the_region_that_made_the_node():
    """A region inside decides for what it made, the one around for the rest (Rule 4)."""
    edges, node = Edges(), leaf(2).sin().grad_fn
    around, first, second = (ReplayTable(recompute_all()) for _ in range(3))
    edges.leave(10, 20, first)
    edges.leave(20, 30, second)
    found = {at: edges.entry(node, at, around) for at in (9, 10, 19, 20, 29, 30)}
    kind = type(node)
    assert [found[at] for at in (9, 30)] == [around[kind]] * 2
    assert [found[at] for at in (10, 19)] == [first[kind]] * 2
    assert [found[at] for at in (20, 29)] == [second[kind]] * 2
    assert len({id(table[kind]) for table in (around, first, second)}) == 3


def test_region_inside_another_one_inside_decides_for_its_own():
    """It ends first, and is the innermost."""
    edges, node = Edges(), leaf(2).sin().grad_fn
    middle, inner = ReplayTable(recompute_all()), ReplayTable(recompute_all())
    edges.leave(12, 15, inner)
    edges.leave(10, 20, middle)
    assert edges.entry(node, 13, middle) is inner[type(node)]
    assert edges.entry(node, 15, middle) is middle[type(node)]


def test_value_that_is_written_to_uncounted_is_kept_as_it_was_left():
    """All of its storage, for every recipe that was made of it."""
    edges, cells = Edges(), [SharedValue(), SharedValue(), SharedValue()]
    values, other = torch.arange(6.0), torch.ones(2)
    edges.wrote([other])  # in a forward that is not watched nothing is noted
    edges.made = WeakIdKeyDictionary()
    for cell in cells[:2]:
        edges.note_made(values[2:], cell)
    edges.note_made(other, cells[2])
    edges.wrote([values[:2]])
    assert [cell.written is None for cell in cells] == [False, False, True]
    assert all(torch.equal(cell.written, values) for cell in cells[:2])


def test_nothing_is_noted_in_a_forward_that_is_not_watched():
    """It costs what it costs in the first one only."""
    edges = Edges()
    edges.note_made(torch.ones(2), SharedValue())
    assert edges.made is None


def test_region_that_has_ended_holds_nothing_of_its_forward():
    """Autograd keeps its hooks as long as the graph."""
    edges, made = Edges(), leaf(2).exp()
    node = made.grad_fn
    edges.own.add(1)
    edges.cells[1] = edges.unpacked[1] = []
    edges.keep(made, "kept")
    edges.planned[node, 0] = "planned"
    source = edges.source(node, 0, "kept", str)
    edges.leave(0, 10**9, ReplayTable(recompute_all()))
    edges.forget()
    around = ReplayTable(recompute_all())
    assert not (edges.own or edges.cells or edges.unpacked or edges.planned)
    assert edges.held(node, 0) is None
    assert edges.source(node, 0, "kept", str) is not source
    assert edges.entry(node, 5, around) is around[type(node)]
    assert edges.ends(node_number(node))


def test_sources_of_a_value_are_those_that_live():
    """Who has them has them stay; those that are gone are left out."""
    cell, lasting, going = SharedValue(), Source(1, str), Source(2, str)
    assert living(cell) == ()
    cell.sources = (weakref.ref(lasting), weakref.ref(going))
    assert living(cell) == (lasting, going)
    del going
    assert living(cell) == (lasting,)
