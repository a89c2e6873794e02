"""Replays through edges, followed: what is looked at and held, and whatever fails meanwhile."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sac_policies import MutationError, RecomputeError
from sac_policies._torch_compat import modes_entered, node_number, sequence_number
from sac_policies.engines.recipe._calls import Calls, Constant
from sac_policies.engines.recipe._rebuilt import rebuilt
from sac_policies.engines.recipe._recipes import reader
from sac_policies.engines.recipe._run import known_of
from sac_policies.engines.recipe._shared_values import SharedValue, Source
from sac_policies.engines.recipe.regions._at_edges import AtEdge, Given, Kept, Seen, Value
from sac_policies.engines.recipe.regions._followed import FollowedValues

from ._followed import ALL, W, changed, learnt, shape_of, values
from ._recipe import Counts, bytes_kept, is_plain, leaf, run


@pytest.fixture(autouse=True)
def _anew() -> None:
    """Nothing is known of functions that other tests ran: they share code."""
    known_of(ALL).repeats.forget()


@pytest.fixture
def x() -> Tensor:
    """An input."""
    return leaf(8, 8)


@pytest.fixture
def masked(x: Tensor) -> tuple[Value, Any, FollowedValues, Tensor]:
    """A sum times a mask: what is written down of it, its node, and who follows."""
    mask = torch.rand(8, 8)

    def function(y: Tensor) -> Tensor:
        return ((y.sin().t() + W) * mask).cos()

    learnt(function, x)
    value = values(function, x)[-1]
    first = sequence_number()
    cos = function(x).grad_fn
    node = cos.next_functions[0][0]
    table = known_of(ALL).tables.anywhere
    return value, node, FollowedValues(table, reader(ALL), first, (x,)), x


def test_same_is_taken(masked: Any) -> None:
    """The sum at the edge, behind it a view and a leaf; the mask from the node."""
    value, node, followed, _ = masked
    cell = followed.value(value, node)
    assert cell is not None
    edge, mask = cell.operands
    assert mask == "_saved_other"
    (maker, below), views = edge
    assert type(maker).__name__ == "AddBackward0"
    assert not views
    assert [len(each[1]) for each in below.operands] == [1, 0]
    assert followed.value(value, node) is cell
    with torch.no_grad():
        made = rebuilt(node, cell, AssertionError)
    assert torch.equal(made, (masked[3].sin().t() + W) * node._saved_other)


def _at(value: Value, at: int, **changes: Any) -> Value:
    operands = list(value.operands or ())
    operands[at] = replace(operands[at], **changes)
    return changed(value, operands=tuple(operands))


def _sum(value: Value) -> Value:
    assert value.operands is not None
    edge = value.operands[0]
    assert isinstance(edge, AtEdge)
    assert isinstance(edge.end, Value)
    return edge.end


CHANGES: dict[str, Callable[[Value], Value]] = {
    "entry": lambda v: changed(v, entry=_sum(v).entry),
    "number": lambda v: changed(v, number=v.number + 1),
    "dtype": lambda v: changed(v, dtype=torch.float64),
    "device": lambda v: changed(v, device=torch.device("meta")),
    "edges": lambda v: changed(v, edges=3),
    "is ready": lambda v: changed(v, operands=None),
    "saved": lambda v: _at(v, 1, unless=1),
    "not saved": lambda v: _at(v, 0, unless=0),
    "deeper": lambda v: _at(v, 0, end=changed(_sum(v), number=0)),
    "view": lambda v: _at(v, 0, end=_at(_sum(v), 0, views=())),
    "other view": lambda v: _at(v, 0, end=_at(_sum(v), 1, views=((type(None), None),))),
    "leaf": lambda v: _at(v, 0, end=None),
    "kept": lambda v: _at(v, 0, end=Kept(0)),
    "given": lambda v: _at(v, 0, end=Given(0)),
    "none given": lambda v: _at(v, 0, end=Given(1)),
    "nobody": lambda v: _at(v, 0, edge=1),
    "seen": lambda v: _at(v, 0, end=Seen(0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_is_not_taken(masked: Any, change: str) -> None:
    """Each thing that is written down is looked at."""
    value, node, followed, _ = masked
    assert followed.value(CHANGES[change](value), node) is None


def test_what_was_seen_has_no_edge(masked: Any) -> None:
    """An edge that is there leads to something else; and what nobody saw is not taken."""
    value, node, followed, _ = masked
    followed.calls, followed.size_bytes = Calls(), 4096
    followed.calls.note(iter([(node_number(node), 0, Constant.of(1.0))]))
    assert followed.value(_at(value, 0, end=Seen(0)), node) is None
    assert followed.value(_at(value, 0, edge=2, end=Seen(1)), node) is None


def test_node_is_the_one_that_was_there_before(masked: Any) -> None:
    """A second reader of a value reads what the first does."""
    value, node, followed, x = masked
    assert followed.value(value, node) is not None
    assert followed.value(value, ((x.sin().t() + W) * torch.rand(8, 8)).grad_fn) is None


def test_callers_node_is_not_taken(masked: Any) -> None:
    """Numbers of another thread's nodes may be those that are expected."""
    value, node, followed, x = masked
    made = FollowedValues(known_of(ALL).tables.anywhere, reader(ALL), followed.first, (x.sin(),))
    made.makers = frozenset({node})
    assert made.value(value, node) is None


@pytest.mark.parametrize("place", [(0, 1), (1, 0)])
def test_kept_value_is_the_one_at_the_edge(masked: Any, place: tuple[int, int]) -> None:
    """Its node and which of the outputs."""
    value, node, followed, _ = masked
    maker, output = node.next_functions[0]
    followed._sources[0] = maker, output, Source(None, reader(ALL))
    kept = _at(value, 0, end=Kept(0))
    assert followed.value(kept, node) is not None
    followed.found.clear()
    other = (node, output) if place[0] else (maker, output + 1)
    followed._sources[0] = *other, Source(None, reader(ALL))
    assert followed.value(kept, node) is None


def test_output_of_a_replay_is_the_first(x: Tensor) -> None:
    """Rules rebuild no other."""
    first = sequence_number()
    one, other = torch.linalg.qr(x)
    nodes = [(each + W).grad_fn for each in (one, other)]
    entries = known_of(ALL).tables.anywhere
    entry = entries[type(nodes[0])]
    inner = Value(1, entry, 0, True, None, None)
    edges = AtEdge(0, None, (), inner), AtEdge(1, None, (), None)
    for number, node in enumerate(nodes, 1):
        followed = FollowedValues(entries, reader(ALL), first, ())
        followed.found[1] = one.grad_fn, SharedValue(), 0
        value = Value(0, entry, number, True, one.dtype, one.device, 2, edges)
        assert (followed.value(value, node) is None) == (number == 2)


class Subclass(nn.Parameter):
    """A parameter that may have operators of its own."""


def test_leaf_is_plain(masked: Any) -> None:
    """What a subclass reads as is not known."""
    value, _, _, x = masked
    first = sequence_number()
    node = ((x.sin().t() + Subclass(W.detach())) * torch.rand(8, 8)).cos().grad_fn
    followed = FollowedValues(known_of(ALL).tables.anywhere, reader(ALL), first, (x,))
    assert followed.value(value, node.next_functions[0][0]) is None


def test_value_is_made_once_for_all_readers(x: Tensor) -> None:
    """Two consumers and a replay read the sum, as where the forward decides for itself."""

    def function(y: Tensor) -> Tensor:
        made = y + W
        return made.sin() + made.cos() + (made * 2.0).exp().sin()

    def sums() -> int:
        out = run(function, x).sum()
        with Counts() as counts:
            out.backward()
        return counts.ops[torch.ops.aten.add.Tensor]

    run(function, x)
    alone = sums()
    assert sums() == alone
    assert shape_of(function, x).followed == 1


def test_what_is_put_into_a_list_was_not_given(x: Tensor) -> None:
    """As keys and values into a cache: followed like any other, and no byte more is kept."""

    def function(y: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(y @ W + y)
        return (cache[-1].sin() + W).cos()

    kept = [bytes_kept(function, x, []) for _ in range(4)]
    assert shape_of(function, x, []).followed == 2
    assert len(set(kept[1:])) == 1


def test_forward_under_a_mode_neither_follows_nor_is_written_down(x: Tensor) -> None:
    """Somebody looks at it: torch may make other nodes, and the forward after it follows again."""

    def function(y: Tensor) -> Tensor:
        return (y @ W).relu().cos() if modes_entered() else (y @ W).sin().cos().relu()

    learnt(function, x)
    with Counts():
        for _ in range(3):
            run(function, x)
    run(function, x)
    assert shape_of(function, x).followed == 2


def test_follower_keeps_what_the_second_forward_kept(x: Tensor) -> None:
    """Not a byte more, with masks and what is kept for replays."""

    def function(y: Tensor) -> Tensor:
        made = torch.linalg.inv(y + 9.0 * torch.eye(8))
        dropped = F.dropout((made + W).repeat(4, 4), 0.5)
        return (dropped + dropped).cos() + (dropped * dropped).sin()

    run(function, x)
    written = bytes_kept(function, x)
    assert bytes_kept(function, x) == written
    assert shape_of(function, x).followed == 1


def test_values_are_gone_after_backward(x: Tensor) -> None:
    """What a value is made of is let go with the graph's."""

    def function(y: Tensor) -> Tensor:
        return (torch.linalg.inv(y + 9.0 * torch.eye(8)) + W).cos()

    learnt(function, x)
    gc.collect()
    out = run(function, x)
    cells = [each for each in gc.get_objects() if type(each) is SharedValue and each.operands]
    (cell,) = map(weakref.ref, cells)
    del cells
    gc.disable()
    try:
        out.sum().backward()
        assert cell() is None
    finally:
        gc.enable()


def test_failed_forward_leaves_nothing(x: Tensor) -> None:
    """No cycle through the graph holds what was taken: of who writes down, and of who follows."""

    class Token:
        pass

    fails: list[bool] = []
    alive: list[weakref.ref[Token]] = []

    def function(y: Tensor) -> Tensor:
        made = (y.sin() + W).cos()
        if fails:
            made.grad_fn.metadata["token"] = token = Token()
            alive.append(weakref.ref(token))
            raise KeyError("as asked")
        return made

    run(function, x)
    for _ in range(3):
        fails.append(True)
        with pytest.raises(KeyError):
            run(function, x)
        gc.collect()
        assert alive.pop()() is None
        fails.clear()
        assert is_plain(function, x)


def test_failed_backward_leaves_values_for_the_next(x: Tensor) -> None:
    """What its readers did not read is made again."""

    def function(y: Tensor) -> Tensor:
        made = y.sin() + W
        return made.cos() + made.exp().sin()

    def fail(grad: Tensor) -> None:
        raise KeyError("as asked")

    learnt(function, x)
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    out = run(function, x)
    handle = out.grad_fn.next_functions[0][0].register_prehook(fail)
    with pytest.raises(KeyError):
        out.sum().backward(retain_graph=True)
    handle.remove()
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)


def test_freed_graph_and_unseen_write_are_refused(x: Tensor) -> None:
    """As where a forward decides for itself."""
    weight = leaf(8, 8)

    def function(y: Tensor) -> tuple[Tensor, Tensor]:
        made = y.sin() + weight
        return made, made.cos()

    for _ in range(3):
        made, out = run(function, x)
    weight.data.add_(1.0)
    with pytest.raises(MutationError, match="other values"):
        out.sum().backward()
    weight.data.sub_(1.0)
    made, out = run(function, x)
    made.sum().backward()
    with pytest.raises(RecomputeError, match="freed"):
        out.sum().backward()


def test_threads_follow_each_for_itself(x: Tensor) -> None:
    """Steps are shared, what is taken is not."""

    def function(y: Tensor) -> Tensor:
        return ((y + W).sin().t() + y).cos()

    learnt(function, x)
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    found: list[bool] = []

    def steps() -> None:
        for _ in range(20):
            own = torch.autograd.grad(run(function, x).sum(), x)[0]
            found.append(torch.equal(own, expected))

    threads = [threading.Thread(target=steps) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [True] * 80
    assert shape_of(function, x).followed == 81
