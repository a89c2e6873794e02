"""Filters and watches."""

from __future__ import annotations

from torch import nn

from mod_tracker._listeners import Callbacks, Filter, Listeners, collect, matches
from mod_tracker._record import Path


def path_to(*names, module=None):
    """A path with these names."""
    path = Path(lambda: None)
    for name in names:
        path = Path(lambda: module, parent=path, name=name)
    return path


def test_pattern_matches_name_or_prefix():
    """With and without the root label; an empty list matches nothing."""
    assert matches("Net.layers.0", ["Net.layers.?"])
    assert matches("Net.layers.0", ["layers.0"])
    assert not matches("Net.layers.0", ["layers"])
    assert not matches("Net", [])


def test_every_part_of_a_filter_must_pass():
    """Include, exclude, depth and type are joined by and."""
    path = path_to("Net", "Net.a", module=nn.ReLU())
    assert Filter().accepts(path)
    assert Filter(include=("a",), types=(nn.ReLU,), max_depth=2).accepts(path)
    assert not Filter(include=("b",)).accepts(path)
    assert not Filter(exclude=("a",)).accepts(path)
    assert not Filter(max_depth=1).accepts(path)
    assert not Filter(types=(nn.Linear,)).accepts(path)


def test_path_nobody_listens_to_has_no_watch():
    """A filter that does not pass is as if nobody were there."""
    listeners, path = Listeners(), path_to("Net")
    remove = listeners.add(Callbacks(pre_forward=print), Filter(include=("Other",)))
    assert listeners.of(path, slow_path=False) is None
    remove()
    listeners.add(Callbacks(pre_forward=print), Filter())
    assert listeners.of(path, slow_path=False).pre_forward == (print,)


def test_only_backward_listeners_need_a_backward():
    """Neither callbacks of forward do, nor those told of a switch, for whom an edge is enough."""
    for kind in ("pre_forward", "post_forward", "switched"):
        assert not collect([Callbacks(**{kind: print})], slow_path=False).backward
    for kind in ("pre_backward", "post_backward"):
        assert collect([Callbacks(**{kind: print})], slow_path=False).backward
